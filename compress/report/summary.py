"""The figures beside the verdict: what the run bought and what it cost, in one line."""

from __future__ import annotations

from compress.records import PAIRED
from compress.report.digits import interval_decimals, plain
from compress.report.schema import MeasurementPart, Report
from compress.report.speed_views import fairest, speed, workloads
from compress.report.task_views import figure
from compress.report.views import find, measured

SPEEDS = {"latency.tpot.ratio": "decode", "latency.forward.ratio": "forward"}
DISTANCES = {"kl.mean": "KL", "cosine.mean": "cosine"}


def summary(report: Report) -> str:
    """`0.421x size, 1.31x decode speed [1.27, 1.35], accuracy -0.3 pt [-1.0, +0.4], KL 0.078 nats [0.075, 0.081]`."""
    parts = []
    size = find(report, "size.ratio", PAIRED) or find(report, "size.ratio")
    if size:
        parts.append(f"{plain(size.value or 0.0, 'x')}x size")
    for metric, name in SPEEDS.items():
        ratio = fairest(report.measurements, metric)
        if ratio:
            several = len(workloads(report.measurements, metric)) > 1
            parts.append(speed(ratio, name, with_workload=several))
    if change := accuracy_change(report):
        parts.append(f"accuracy {change}")
    for metric, name in DISTANCES.items():
        found = find(report, metric, PAIRED) or find(report, metric)
        if found:
            parts.append(f"{name} {measured(found)}")
    return ", ".join(parts)


def accuracy_change(report: Report) -> str:
    """The drop with its sign turned, so that less is worse; of all tasks pooled, or of the only one."""
    drop = figure(report, "accuracy.drop", None)
    if drop is None and len(report.tasks) == 1:
        drop = figure(report, "accuracy.drop", report.tasks[0].name)
    return "" if drop is None else turned(drop)


def turned(drop: MeasurementPart) -> str:
    """`-0.3 pt [-1.0, +0.4]`."""
    value = drop.value or 0.0
    ends = None if drop.interval is None else (-drop.interval.high, -drop.interval.low)
    decimals = None if ends is None else interval_decimals(*ends)
    if ends is None or decimals is None:
        return f"{signed(-value, 2)} pt"
    return f"{signed(-value, decimals)} pt [{signed(ends[0], decimals)}, {signed(ends[1], decimals)}]"


def signed(value: float, decimals: int) -> str:
    """With its sign, 0 without one."""
    shown = f"{value:+.{decimals}f}"
    return shown.lstrip("+-") if float(shown) == 0 else shown
