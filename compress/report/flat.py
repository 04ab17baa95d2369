"""The numbers of a report under flat keys: metrics.json, for `dvc metrics diff`, CML and dashboards.

Keys, which do not change as long as a metric keeps its id:

- `kl.mean`, `latency.tpot.ratio`: the result compared with the original, `original.size` and `result.size`: one of
  them, `floor.kl.mean`: the original against itself. `KEY.low` and `KEY.high`: the interval.
- `accuracy[TASK].drop`: of a task, as gates write it; `accuracy.drop`: of all tasks pooled.
- where a metric was measured in several ways, the plain key is the figure of the summary line: times in the first
  workload and the fastest dtype, ratios against the fastest original, else the first; each stands once more as
  `KEY@bfloat16,batch 4`, its interval as `KEY.low@bfloat16,batch 4`.
- `verdict`, `exit_code`, `gates.passed`, `gates.failed`, `gates.inconclusive`, `tasks[TASK].items`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from compress.records import PAIRED
from compress.report.clean import defused_json
from compress.report.schema import MeasurementPart, Report
from compress.report.speed_views import RATIO_LABELS, fairest_of, workload
from compress.report.views import TELLING_APART, condition, is_floor

Flat = dict[str, float | int | str | None]


def metrics_json(report: Report) -> str:
    """The content of metrics.json."""
    text = json.dumps(flat_metrics(report), indent=2, ensure_ascii=False, allow_nan=False)
    return defused_json(text) + "\n"


def flat_metrics(report: Report) -> Flat:
    """Every number of the report, none of them rounded; None for what could not be measured."""
    outcomes = [gate.outcome for gate in report.verdict.gates]
    flat: Flat = {
        "verdict": report.verdict.outcome,
        "exit_code": report.verdict.exit_code,
        "gates.passed": outcomes.count("PASS"),
        "gates.failed": outcomes.count("FAIL"),
        "gates.inconclusive": outcomes.count("INCONCLUSIVE"),
    }
    flat |= {f"tasks[{task.name}].items": task.items for task in report.tasks}
    groups: dict[str, list[MeasurementPart]] = defaultdict(list)
    for m in report.measurements:
        groups[key_of(m)].append(m)
    for key, group in groups.items():
        flat |= with_interval(key, representative(group))
        for name, m in variants(group).items() if len(group) > 1 else ():
            flat |= with_interval(key, m, f"@{name}")
    return flat


def with_interval(key: str, m: MeasurementPart, suffix: str = "") -> Flat:
    flat: Flat = {f"{key}{suffix}": m.value}
    if m.interval is not None:
        flat |= {f"{key}.low{suffix}": m.interval.low, f"{key}.high{suffix}": m.interval.high}
    return flat


def key_of(m: MeasurementPart) -> str:
    """`accuracy[next_sentence].drop`, `original.size`, `floor.kl.mean`."""
    if is_floor(m):
        return f"floor.{name_of(m)}"
    return name_of(m) if m.subject == PAIRED else f"{m.subject}.{name_of(m)}"


def name_of(m: MeasurementPart) -> str:
    """The metric as a gate names it."""
    if m.task is None:
        return m.metric
    family, dot, rest = m.metric.partition(".")
    return f"{family}[{m.task}]{dot}{rest}"


def variant(m: MeasurementPart, keys: Sequence[str] = TELLING_APART) -> str:
    """`bfloat16/float32,batch 4`: everything that tells measurements of one metric apart, versions left out."""
    conditions = m.conditions | {"engine": str(m.conditions.get("engine") or "").partition(" ")[0]}
    if conditions.get("dtype") and conditions.get("original_dtype"):
        conditions["dtype"] = f"{conditions['dtype']}/{conditions['original_dtype']}"
    return ",".join(condition(key, conditions[key]) for key in keys if conditions.get(key))


def variants(group: Sequence[MeasurementPart]) -> dict[str, MeasurementPart]:
    """Each under what tells it from the others; by its comparison, or else its place, where conditions do not."""
    named: dict[str, MeasurementPart] = {}
    for i, m in enumerate(group):
        parts = [variant(m), str(m.conditions.get("comparison") or ""), f"number {i + 1}"]
        names = [",".join(filter(None, parts[:n])) for n in (1, 2, 3)]
        named[next(name for name in names if name and name not in named)] = m
    return named


def representative(group: Sequence[MeasurementPart]) -> MeasurementPart:
    """The one that stands for several ways of measuring the same thing."""
    known = [m for m in group if m.value is not None]
    if not known:
        return group[0]
    first = [m for m in known if workload(m) == workload(known[0])]
    if first[0].metric in RATIO_LABELS:
        return fairest_of(first) or first[0]
    if not first[0].metric.startswith(("latency.", "throughput.", "memory.")):
        return first[0]
    sign = -1 if first[0].better == "higher" else 1
    return min(first, key=lambda m: sign * (m.value or 0.0))
