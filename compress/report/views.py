"""The rows of a report, as text in cells: what terminal and Markdown both show, chosen once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.report.digits import NOT_MEASURED, beside, estimate, quantity, span
from compress.report.schema import GatePart, LayerPart, MeasurementPart, Report

PAIRED = "result/original"
WORST_LAYERS = 5

QUALITY_LABELS = {
    "size": "weight files",
    "parameters": "parameters",
    "bits_per_weight": "bits/weight",
    "perplexity": "perplexity",
    "kl.mean": "KL, mean",
    "kl.median": "KL, median",
    "kl.p99": "KL, p99",
    "top1.agreement": "same top-1",
    "cosine.mean": "cosine, mean",
    "cosine.p5": "cosine, p5",
}
RATIO_OF = {"size": "size.ratio", "perplexity": "perplexity.ratio"}
SPEED_LABELS = {
    "latency.ttft": "first token",
    "latency.tpot": "per token",
    "latency.forward": "forward pass",
    "memory.peak": "peak memory",
}
SPEED_RATIOS = {
    "latency.ttft.ratio": "first token",
    "latency.tpot.ratio": "per token",
    "latency.forward.ratio": "forward pass",
}
CONDITION_ORDER = ("dtype", "engine", "device", "threads", "batch", "prompt", "new_tokens")
SPEAKING = ("dtype", "engine", "device")
"""Conditions whose value needs no name beside it."""
TELLING_APART = ("dtype", "engine")
"""Conditions that name a row where they differ."""
FASTEST = "fastest original"
"""What a comparison says of itself when the original ran in the dtype it is fastest in."""


@dataclass(frozen=True)
class GateRow:
    """One gate; `line` is "line 23" of the recipe, or empty."""

    outcome: str
    asked: str
    measured: str
    interval: str
    reason: str
    line: str


@dataclass(frozen=True)
class QualityRow:
    """One metric: the original's value, the result's, their paired comparison, and the noise floor."""

    label: str
    original: str
    result: str
    change: str
    floor: str


@dataclass(frozen=True)
class SpeedTable:
    """One row for each way a model was run, its name first; `conditions` hold for all rows."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    conditions: str


@dataclass(frozen=True)
class LeftAlone:
    """Layers that share a reason for having been left as they were; `names` has `*` for block numbers."""

    reason: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class SchemeGroup:
    """Layers that became the same; `names` has `*` for block numbers."""

    scheme: str
    count: int
    names: tuple[str, ...]


def gate_rows(report: Report) -> tuple[GateRow, ...]:
    """One row for each gate, in the order asked."""
    return tuple(
        GateRow(
            outcome=gate.outcome,
            asked=gate.expression,
            measured=beside(gate.value, gate.threshold, gate.unit),
            interval=gate_interval(gate),
            reason=gate.reason,
            line="" if gate.line is None else f"line {gate.line}",
        )
        for gate in report.verdict.gates
    )


def gate_interval(gate: GatePart) -> str:
    """The one-sided bounds a gate with a level was judged by, else the two-sided interval."""
    if gate.bound is not None and gate.bound.lower is not None and gate.bound.upper is not None:
        return span(gate.bound.lower, gate.bound.upper, gate.unit)
    return span(gate.interval.low, gate.interval.high, gate.unit) if gate.interval else NOT_MEASURED


def find(report: Report, metric: str, subject: str | None = None) -> MeasurementPart | None:
    """The first measurement of `metric` (of `subject`) that has a value."""
    return next(
        (m for m in report.measurements if m.metric == metric and m.value is not None and subject in (None, m.subject)),
        None,
    )


def measured(measurement: MeasurementPart | None) -> str:
    """`0.0342 nats [0.0310, 0.0374]`."""
    if measurement is None or measurement.value is None:
        return NOT_MEASURED
    if measurement.interval is None:
        return quantity(measurement.value, measurement.unit)
    low, high = measurement.interval.low, measurement.interval.high
    return " ".join(estimate(measurement.value, low, high, measurement.unit))


def is_floor(measurement: MeasurementPart) -> bool:
    """Whether this compares the original with itself under other conditions: the noise floor."""
    return measurement.subject.startswith("original") and "/" in measurement.subject


def quality_rows(report: Report) -> tuple[QualityRow, ...]:
    """Size and fidelity, one row for each metric; one for each condition where a metric has several."""
    rows = []
    for metric, label in QUALITY_LABELS.items():
        own = [m for m in report.measurements if m.metric == metric and not is_floor(m)]
        ratios = [m for m in report.measurements if m.metric == RATIO_OF.get(metric)]
        floors = [m for m in report.measurements if m.metric == metric and is_floor(m)]
        names = condition_names(own + ratios)
        for name in dict.fromkeys(names[id(m)] for m in own):
            here = {m.subject: m for m in own + ratios if names[id(m)] == name}
            paired = here.get(PAIRED)
            rows.append(
                QualityRow(
                    label=f"{label} ({name})" if name else label,
                    original=measured(here.get("original")),
                    result=measured(here.get("result")),
                    change=measured(paired) if paired else change(here.get("original"), here.get("result")),
                    floor=measured(floors[0]) if floors else NOT_MEASURED,
                )
            )
    return tuple(rows)


def change(original: MeasurementPart | None, result: MeasurementPart | None) -> str:
    """The plain quotient of two values that were not measured as a pair."""
    if original is None or result is None or not original.value or result.value is None:
        return NOT_MEASURED
    return quantity(result.value / original.value, "x")


def speed_table(report: Report) -> SpeedTable:
    """Times and memory of every model in every dtype and engine it was run in."""
    own = [m for m in report.measurements if m.metric in SPEED_LABELS]
    return pivot(own, SPEED_LABELS, lambda m, name: f"{m.subject} {name}".strip())


def speed_ratio_table(report: Report) -> SpeedTable:
    """Paired ratios of times, with their intervals; a row for the noise floor where it was measured."""
    own = sorted((m for m in report.measurements if m.metric in SPEED_RATIOS), key=is_floor)

    def row_name(m: MeasurementPart, _name: str) -> str:
        pair = dtypes(m)
        if is_floor(m):
            return f"noise floor, {pair[0]}" if pair else "noise floor"
        return " / ".join(pair) if pair else m.subject.replace("/", " / ")

    return pivot(own, SPEED_RATIOS, row_name, corner="result / original")


def pivot(
    own: Sequence[MeasurementPart],
    labels: Mapping[str, str],
    row_name: Callable[[MeasurementPart, str], str],
    corner: str = "",
) -> SpeedTable:
    """A table with one column for each metric that occurs and one row for each subject and condition."""
    names = condition_names(own)
    present = [metric for metric in labels if any(m.metric == metric for m in own)]
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for m in own:
        cells[row_name(m, names[id(m)])][m.metric] = measured(m)
    rows = tuple((name, *(row.get(metric, NOT_MEASURED) for metric in present)) for name, row in cells.items())
    shared = common_conditions(own)
    return SpeedTable(
        headers=(corner, *(labels[metric] for metric in present)),
        rows=rows,
        conditions=", ".join(condition(key, shared[key]) for key in CONDITION_ORDER if key in shared),
    )


def condition_names(measurements: Sequence[MeasurementPart]) -> dict[int, str]:
    """For each measurement (by id) the conditions that tell it from its like: "float32", "bfloat16, vllm"."""
    shared = common_conditions(measurements)
    return {
        id(m): ", ".join(
            condition(key, m.conditions[key]) for key in TELLING_APART if key in m.conditions and key not in shared
        )
        for m in measurements
    }


def common_conditions(measurements: Sequence[MeasurementPart]) -> dict[str, Any]:
    """The simple conditions that all measurements that name them agree on."""
    seen: dict[str, list[Any]] = defaultdict(list)
    for m in measurements:
        for key, value in m.conditions.items():
            if value is not None and not isinstance(value, dict | list) and value not in seen[key]:
                seen[key].append(value)
    return {key: seen[key][0] for key in ordered(seen) if len(seen[key]) == 1}


def ordered(keys: Iterable[str]) -> list[str]:
    known = [key for key in CONDITION_ORDER if key in set(keys)]
    return known + [key for key in keys if key not in known]


def condition(key: str, value: Any) -> str:
    """`float32` for what speaks for itself, `new tokens 48` for the rest."""
    return str(value) if key in SPEAKING else f"{key.replace('_', ' ')} {value}"


def layers(report: Report) -> tuple[LayerPart, ...]:
    return tuple(layer for step in report.steps for layer in step.layers)


def left_alone(report: Report) -> tuple[LeftAlone, ...]:
    """What was not quantized, grouped by reason, the largest group first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for layer in layers(report):
        if layer.skipped is not None:
            groups[layer.skipped].append(layer.name)
    found = [LeftAlone(reason, len(names), tuple(Counter(map(pattern, names)))) for reason, names in groups.items()]
    return tuple(sorted(found, key=lambda group: (-group.count, group.reason)))


def by_scheme(report: Report) -> tuple[SchemeGroup, ...]:
    """The quantized layers by what they became, the largest group first; nothing where all became the same."""
    groups: dict[str, list[str]] = defaultdict(list)
    for layer in layers(report):
        if layer.scheme is not None:
            groups[layer.scheme].append(layer.name)
    found = [SchemeGroup(scheme, len(names), tuple(Counter(map(pattern, names)))) for scheme, names in groups.items()]
    return tuple(sorted(found, key=lambda group: (-group.count, group.scheme))) if len(found) > 1 else ()


def pattern(name: str) -> str:
    """`model.layers.7.mlp.gate` as `model.layers.*.mlp.gate`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def worst_layers(report: Report, count: int = WORST_LAYERS) -> tuple[LayerPart, ...]:
    """The quantized layers with the largest relative output error."""
    known = [layer for layer in layers(report) if layer.error_after is not None and layer.skipped is None]
    return tuple(sorted(known, key=lambda layer: (-(layer.error_after or 0.0), layer.name))[:count])


def summary(report: Report) -> str:
    """The figures for the verdict line: size, speed with its interval, distance from the original."""
    parts = []
    size = find(report, "size.ratio", PAIRED) or find(report, "size.ratio")
    if size:
        parts.append(f"{quantity(size.value, 'x')} size")
    for metric, name in (("latency.tpot.ratio", "decode"), ("latency.forward.ratio", "forward")):
        ratio = fairest(report.measurements, metric)
        if ratio:
            parts.append(speed(ratio, name))
    for metric, name in (("kl.mean", "KL"), ("cosine.mean", "cosine")):
        found = find(report, metric, PAIRED) or find(report, metric)
        if found:
            parts.append(f"{name} {measured(found)}")
    return ", ".join(parts)


def fairest(measurements: Sequence[MeasurementPart], metric: str) -> MeasurementPart | None:
    """The result at its fastest against the original at its fastest: each as its user would run it.

    Where no comparison says that it is with the fastest original, the worst one counts.
    """
    ratios = [m for m in measurements if m.metric == metric and m.subject == PAIRED and m.value]
    fastest = [m for m in ratios if FASTEST in str(m.conditions.get("comparison", ""))]
    if fastest:
        return min(fastest, key=lambda m: m.value or 0.0)
    return max(ratios, key=lambda m: m.value or 0.0, default=None)


def dtypes(ratio: MeasurementPart) -> tuple[str, str] | None:
    """The dtypes the result and the original ran in, or None where they are not known."""
    dtype = ratio.conditions.get("dtype")
    return None if dtype is None else (str(dtype), str(ratio.conditions.get("original_dtype", dtype)))


def dtypes_in_words(ratio: MeasurementPart) -> str:
    """`both in bfloat16`, `result in float32, original in bfloat16`, or empty."""
    pair = dtypes(ratio)
    if pair is None:
        return ""
    return f"both in {pair[0]}" if pair[0] == pair[1] else f"result in {pair[0]}, original in {pair[1]}"


def speed(ratio: MeasurementPart, name: str) -> str:
    """A ratio of times as the speed a person asks for: `1.31x decode speed [1.27, 1.35]`."""
    value = ratio.value or 0.0
    words = dtypes_in_words(ratio)
    where = f" ({words})" if words else ""
    if ratio.interval is None or ratio.interval.low <= 0:
        return f"{quantity(1 / value, 'x')} {name} speed{where}"
    number, ends = estimate(1 / value, 1 / ratio.interval.high, 1 / ratio.interval.low, "x")
    return f"{number} {name} speed {ends}{where}"
