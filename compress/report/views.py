"""The rows of a report, as text in cells: what terminal and Markdown both show, chosen once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.records import PAIRED, WORKLOAD
from compress.report.digits import NOT_MEASURED, beside, estimate, quantity, span
from compress.report.schema import GatePart, MeasurementPart, Report, ServingPart

QUALITY_LABELS = {
    "size": "weight files",
    "parameters": "parameters",
    "kv_bytes": "KV cache per token",
    "bits_per_weight": "bits/weight",
    "perplexity": "perplexity",
    "kl.mean": "KL, mean",
    "kl.median": "KL, median",
    "kl.p99": "KL, p99",
    "kl.p999": "KL, p99.9",
    "kl.max": "KL, largest",
    "tv.mean": "total variation",
    "top1.agreement": "same top-1",
    "cosine.mean": "cosine, mean",
    "cosine.p5": "cosine, p5",
    "similarity.spearman": "rank of pairs",
    "ndcg": "nDCG@10",
}
GENERATION_LABELS = {
    "generation.length_ratio": "length of answers",
    "generation.repetition": "repeated 4-grams",
    "generation.first_divergence": "tokens until they part",
}
COMPARED_BY = {"size": "size.ratio", "perplexity": "perplexity.ratio", "ndcg": "ndcg.drop"}
"""The metric that compares two values as a pair."""
CONDITION_ORDER = ("dtype", "engine", "device", "threads", "batch", "prompt", "new_tokens")
SPEAKING = ("dtype", "engine", "device")
"""Conditions whose value needs no name beside it."""
TELLING_APART = ("dtype", "engine", *WORKLOAD)
"""Conditions that name a row where they differ."""


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
    """The one-sided bounds a gate with a level was judged by, each at that level, else the two-sided interval."""
    if gate.bound is not None and gate.bound.lower is not None and gate.bound.upper is not None:
        return f"{span(gate.bound.lower, gate.bound.upper, gate.unit)} each @{gate.bound.level * 100:.6g}%"
    return span(gate.interval.low, gate.interval.high, gate.unit) if gate.interval else NOT_MEASURED


def find(report: Report, metric: str, subject: str | None = None) -> MeasurementPart | None:
    """The first measurement of `metric` that has a value, of `subject`; of any that is no noise floor for None."""
    own = (m for m in report.measurements if m.metric == metric and m.value is not None)
    return next((m for m in own if m.subject == subject or (subject is None and not is_floor(m))), None)


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
    return compared_rows(report, QUALITY_LABELS)


def generation_rows(report: Report) -> tuple[QualityRow, ...]:
    """What the answers of the two models look like."""
    return compared_rows(report, GENERATION_LABELS)


def compared_rows(report: Report, labels: Mapping[str, str]) -> tuple[QualityRow, ...]:
    rows = []
    for metric, label in labels.items():
        own = [m for m in report.measurements if m.metric == metric and m.value is not None and not is_floor(m)]
        ratios = [m for m in report.measurements if m.metric == COMPARED_BY.get(metric) and not is_floor(m)]
        floors = [m for m in report.measurements if m.metric in (metric, COMPARED_BY.get(metric)) and is_floor(m)]
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
                    floor=measured(widest(floors)),
                )
            )
    return tuple(rows)


def widest(floors: Sequence[MeasurementPart]) -> MeasurementPart | None:
    """The floor that lies farthest from perfect: under a change that means nothing, so much can differ."""
    known = [m for m in floors if m.value is not None]
    sign = -1 if known and known[0].better == "higher" else 1
    return max(known, key=lambda m: sign * (m.value or 0.0), default=None)


def change(original: MeasurementPart | None, result: MeasurementPart | None) -> str:
    """The plain quotient of two values that were not measured as a pair."""
    if original is None or result is None or not original.value or result.value is None:
        return NOT_MEASURED
    return quantity(result.value / original.value, "x")


def condition_names(measurements: Sequence[MeasurementPart], keys: Sequence[str] = TELLING_APART) -> dict[int, str]:
    """For each measurement (by id) the conditions that tell it from its like: "float32", "bfloat16, batch 4"."""
    shared = common_conditions(measurements)
    return {
        id(m): ", ".join(
            condition(key, m.conditions[key]) for key in keys if m.conditions.get(key) is not None and key not in shared
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


def serving_line(engine: ServingPart) -> str:
    """`loads it, as far as its sources tell (read, not run): ...`; then why not, or on which conditions."""
    said = f"{'loads it' if engine.loads else 'does not load it'}, as far as its sources tell (read, not run)"
    return f"{said}: {'; '.join(engine.reasons)}" if engine.reasons else said
