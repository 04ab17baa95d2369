"""Quality against time: the points of the report's chart, chosen from its measurements."""

from __future__ import annotations

from dataclasses import dataclass

from compress.records import PAIRED, WORKLOAD
from compress.report.digits import quantity
from compress.report.schema import MeasurementPart, Report
from compress.report.speed_views import workload
from compress.report.views import common_conditions, condition, find, is_floor, measured, ordered

TIMES = (("latency.tpot", "time per token"), ("latency.forward", "time of a forward pass"))
SAME = {
    "top1.agreement": ("same top-1 token as the original", 100.0),
    "cosine.mean": ("cosine to the original", 1.0),
    "kl.mean": ("mean KL from the original", 0.0),
}
"""What stands for accuracy where no task was measured, and the value of the original against itself."""


@dataclass(frozen=True)
class Value:
    """A number, the ends of its interval (the number itself where there is none), and how it is shown."""

    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Point:
    """A variant: time in ms, quality in the chart's unit, weight files in MB (None where not measured)."""

    label: str
    original: bool
    time: Value
    quality: Value
    size: float | None

    @property
    def size_text(self) -> str:
        return quantity(self.size, "MB", 3)


@dataclass(frozen=True)
class Quality:
    """What is drawn upwards: the value of each subject, and of the original against itself (the noise floor)."""

    name: str
    unit: str
    higher: bool
    values: dict[str, Value]
    floor: float | None = None


@dataclass(frozen=True)
class Tradeoff:
    """A chart of quality against time; `conditions` hold for all points."""

    time_name: str
    quality: Quality
    points: tuple[Point, ...]
    conditions: str


def tradeoff(report: Report) -> Tradeoff | None:
    """The chart of a report, for the first workload that was timed; None where time or quality was not measured."""
    timed = next(((metric, name) for metric, name in TIMES if find(report, metric)), None)
    quality = accuracy(report) or closeness(report)
    if timed is None or quality is None:
        return None
    own = [m for m in report.measurements if m.metric == timed[0] and m.value is not None]
    own = [m for m in own if m.subject in quality.values and workload(m) == workload(own[0])]
    sizes = {m.subject: m.value for m in report.measurements if m.metric == "size"}
    points = [
        Point(variant(m), m.subject == "original", as_value(m), quality.values[m.subject], sizes.get(m.subject))
        for m in own
    ]
    shared = common_conditions(own)
    facts = ", ".join(condition(key, shared[key]) for key in ordered(shared) if key in (*WORKLOAD, "engine", "device"))
    return Tradeoff(timed[1], quality, tuple(points), facts) if points else None


def accuracy(report: Report) -> Quality | None:
    """Accuracy pooled over the tasks, or of the only task."""
    found = [m for m in report.measurements if m.metric == "accuracy" and m.value is not None]
    tasks = {m.task for m in found}
    task = None if None in tasks else next(iter(tasks), None)
    if not found or (None not in tasks and len(tasks) > 1):
        return None
    name = f"accuracy, {'all tasks' if task is None else task}"
    return Quality(name, "%", True, {m.subject: as_value(m) for m in reversed(found) if m.task == task})


def closeness(report: Report) -> Quality | None:
    """How close the result is to the original: the original itself is as close as can be."""
    for metric, (name, same) in SAME.items():
        paired = find(report, metric, PAIRED)
        if paired is None:
            continue
        itself = Value(same, same, same, quantity(same, paired.unit))
        floors = [m.value for m in report.measurements if m.metric == metric and is_floor(m)]
        values = {"original": itself, "result": as_value(paired)}
        return Quality(name, paired.unit, paired.better == "higher", values, next(iter(floors), None))
    return None


def as_value(m: MeasurementPart) -> Value:
    value = m.value or 0.0
    low, high = (m.interval.low, m.interval.high) if m.interval else (value, value)
    return Value(value, min(low, value), max(high, value), measured(m))


def variant(m: MeasurementPart) -> str:
    """`result bfloat16`; the engine beside it only where the label of the variant names it."""
    return str(m.conditions.get("variant") or " ".join(filter(None, (m.subject, str(m.conditions.get("dtype", ""))))))
