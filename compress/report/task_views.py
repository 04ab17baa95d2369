"""The tasks of a report as rows of text: what every renderer shows of them, chosen once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compress.records import PAIRED
from compress.report.digits import NOT_MEASURED, plain, quantity
from compress.report.schema import FlipPart, MeasurementPart, Report, TaskPart
from compress.report.views import QualityRow, is_floor, measured

POOLED = "all tasks"


@dataclass(frozen=True)
class TaskRow:
    """One task, or all of them pooled; every field that is not a name is text for a cell, "-" where unknown.

    Attributes:
        name: the task's, POOLED for the pooled row.
        task: the part behind the row; None for the pooled row.
        metric: what counts as right: "acc".
        original, result: accuracies with their intervals: `54.20 % [52.1, 56.3]`.
        drop: original - result, positive where the result is worse: `0.3 pt [-1.0, 1.6]`.
        losses, gains: items that only the original, only the result answers right.
        p: one-sided exact McNemar p.
        recovery, corrected: result / original, and the same above chance.
        expected_drop: fall of the probability of the right choice, in points.
        margin_shift: change of the log-likelihood margin of the right choice.
        detectable: the smallest drop that so many items find in 80 of 100 runs, at the flips that were seen.
    """

    name: str
    task: TaskPart | None
    metric: str
    items: str
    original: str
    result: str
    drop: str
    losses: str
    gains: str
    p: str
    recovery: str
    corrected: str
    expected_drop: str
    margin_shift: str
    detectable: str


def task_rows(report: Report) -> tuple[TaskRow, ...]:
    """One row for each task in the order of the report, then the pooled one where several were pooled."""
    rows = [task_row(report, task) for task in report.tasks]
    pooled = any(m.metric.startswith("accuracy") and m.task is None for m in report.measurements)
    return (*rows, task_row(report, None)) if pooled and len(rows) != 1 else tuple(rows)


def task_row(report: Report, task: TaskPart | None) -> TaskRow:
    """The row of one task; of all tasks pooled for None."""
    name = None if task is None else task.name

    def cell(metric: str, subject: str = PAIRED) -> str:
        return measured(figure(report, metric, name, subject))

    items = sum(one.items for one in report.tasks) if task is None else task.items
    detectable = None if task is None else task.detectable_drop
    return TaskRow(
        name=POOLED if task is None else task.name,
        task=task,
        metric="" if task is None else task.metric,
        items=f"{items:,}" if items else NOT_MEASURED,
        original=cell("accuracy", "original"),
        result=cell("accuracy", "result"),
        drop=cell("accuracy.drop"),
        losses=counted(report, "losses", task),
        gains=counted(report, "gains", task),
        p=p_value(figure(report, "accuracy.mcnemar_p", name)),
        recovery=cell("accuracy.recovery"),
        corrected=cell("accuracy.recovery_corrected"),
        expected_drop=cell("accuracy.expected_drop"),
        margin_shift=cell("accuracy.margin_shift"),
        detectable=quantity(detectable, "pt", 2),
    )


def figure(report: Report, metric: str, task: str | None, subject: str = PAIRED) -> MeasurementPart | None:
    """The measurement of one task (None: pooled); of any subject where the paired one is asked and there is none."""
    own = [m for m in report.measurements if m.metric == metric and m.task == task and m.value is not None]
    own = [m for m in own if not is_floor(m)]
    exact = (m for m in own if m.subject == subject)
    return next(exact, next(iter(own), None) if subject == PAIRED else None)


def counted(report: Report, which: str, task: TaskPart | None) -> str:
    """Losses or gains: the task's own count, for the pooled row the sum."""
    parts = report.tasks if task is None else (task,)
    return f"{sum(getattr(part, which) for part in parts):,}" if parts else NOT_MEASURED


def p_value(measurement: MeasurementPart | None) -> str:
    """`0.031`; `< 0.0001` below that."""
    if measurement is None or measurement.value is None:
        return NOT_MEASURED
    return "< 0.0001" if measurement.value < 1e-4 else plain(measurement.value, "", 2)


def smallest_drop(row: TaskRow) -> str:
    """What the items can show at all, as a sentence; empty where nothing is known."""
    if row.detectable == NOT_MEASURED:
        return ""
    return (
        f"{row.name}: {row.items} items find a drop of {row.detectable} in 80 of 100 runs; a smaller one can go unseen"
    )


def smallest_drops(rows: Sequence[TaskRow]) -> str:
    """The same for all tasks in one sentence; empty where nothing is known."""
    known = [f"{row.name} {row.detectable}" for row in rows if row.detectable != NOT_MEASURED]
    if not known:
        return ""
    return f"the smallest drop that the items find in 80 of 100 runs: {', '.join(known)}; a smaller one can go unseen"


def ordered_flips(task: TaskPart) -> tuple[FlipPart, ...]:
    """The task's flips, losses first, in the order they were recorded."""
    return tuple(sorted(task.flips, key=lambda flip: not flip.lost))


def accuracy_rows(report: Report) -> list[QualityRow]:
    """The drop of all tasks pooled; of each where they were not pooled."""
    rows = task_rows(report)
    pooled = [row for row in rows if row.task is None]
    return [
        QualityRow(f"accuracy, {row.name}", row.original, row.result, row.drop, NOT_MEASURED) for row in pooled or rows
    ]
