"""What the HTML report draws and folds: gates on their scales, clipped texts, tasks as bars, flips."""

from __future__ import annotations

from dataclasses import dataclass

from compress.report.digits import NOT_MEASURED, quantity
from compress.report.schema import FlipPart, GatePart, MeasurementPart, Report, TaskPart
from compress.report.task_views import TaskRow, figure, ordered_flips, smallest_drop, task_rows
from compress.report.views import GateRow, gate_rows

OUTCOMES = ("FAIL", "INCONCLUSIVE", "PASS")
"""As a reader wants them: what needs work first."""
CLIP = 240
"""Characters of a text that are shown before it is folded."""
TASK_FIGURES = (
    ("original", "accuracy, original"),
    ("result", "accuracy, result"),
    ("drop", "drop"),
    ("p", "McNemar p, one-sided"),
    ("recovery", "recovery, raw"),
    ("corrected", "recovery above chance"),
    ("expected_drop", "expected accuracy drop"),
    ("margin_shift", "shift of the margin"),
)
"""Fields of a task's row, and what stands over them."""


@dataclass(frozen=True)
class Bar:
    """A gate drawn on a line; positions in percent of its width. `low` and `high` are None without an interval."""

    threshold: float
    value: float
    low: float | None
    high: float | None
    good_from: float
    good_to: float


@dataclass(frozen=True)
class GateView:
    """A gate's row, its distance from the limit in words, and its bar."""

    row: GateRow
    distance: str
    limit: str
    bar: Bar | None


@dataclass(frozen=True)
class Clip:
    """A text and its beginning; the same where it is short."""

    full: str
    head: str


@dataclass(frozen=True)
class FlipView:
    """A flip in texts that fit.

    Attributes:
        expected: the right answer; None where the model that is right says just that.
        answers: who answered, what, whether it is right, and the margin.
    """

    lost: bool
    id: str
    question: Clip
    expected: Clip | None
    answers: tuple[tuple[str, Clip, bool, str], ...]


@dataclass(frozen=True)
class Share:
    """A part of all items, as a segment of a bar; `percent` of its width."""

    kind: str
    label: str
    items: int
    percent: float


@dataclass(frozen=True)
class TaskView:
    """A task's row, its figures under their names, its items as a bar, and its flips; none of these when pooled."""

    row: TaskRow
    figures: tuple[tuple[str, str], ...]
    shares: tuple[Share, ...]
    limit: str
    flips: tuple[FlipView, ...]


def gate_views(report: Report) -> tuple[GateView, ...]:
    """The gates, what failed first, else in the order asked."""
    pairs = zip(gate_rows(report), report.verdict.gates, strict=True)
    views = [GateView(row, distance(gate), quantity(gate.threshold, gate.unit), gate_bar(gate)) for row, gate in pairs]
    return tuple(sorted(views, key=lambda view: OUTCOMES.index(view.row.outcome)))


def distance(gate: GatePart) -> str:
    """By how much the value misses or keeps the limit; empty where nothing was measured."""
    if gate.value is None or gate.threshold is None:
        return ""
    if gate.value == gate.threshold:
        return "exactly at the limit"
    side = "above" if gate.value > gate.threshold else "below"
    return f"{quantity(abs(gate.value - gate.threshold), gate.unit)} {side} the limit"


def gate_bar(gate: GatePart) -> Bar | None:
    """The bounds that decided (else the interval), the value and the limit on one scale."""
    if gate.value is None or gate.threshold is None:
        return None
    low, high = gate_ends(gate)
    known = [end for end in (gate.value, gate.threshold, low, high) if end is not None]
    least, most = min(known), max(known)
    margin = 0.2 * (most - least) or abs(most) or 1.0
    least, most = least - margin, most + margin

    def at(value: float) -> float:
        return round(100 * (value - least) / (most - least), 2)

    threshold = at(gate.threshold)
    below = any(sign in gate.expression for sign in "<≤")
    return Bar(
        threshold=threshold,
        value=at(gate.value),
        low=None if low is None else at(low),
        high=None if high is None else at(high),
        good_from=0.0 if below else threshold,
        good_to=threshold if below else 100.0,
    )


def gate_ends(gate: GatePart) -> tuple[float | None, float | None]:
    if gate.bound is not None and gate.bound.lower is not None and gate.bound.upper is not None:
        return gate.bound.lower, gate.bound.upper
    return (gate.interval.low, gate.interval.high) if gate.interval else (None, None)


def headline_parts(report: Report) -> tuple[str, tuple[str, ...]]:
    """The headline without the outcome it begins with, and the reasons it ends with, one by one."""
    verdict = report.verdict
    text = verdict.headline.removeprefix(verdict.outcome).lstrip(": ")
    reasons = tuple(gate.reason for gate in verdict.gates if gate.outcome == verdict.outcome)
    ending = "; ".join(reasons)
    if not ending or not text.endswith(ending):
        return text, ()
    return text.removesuffix(ending).rstrip(": "), reasons


def clip(text: str, length: int = CLIP) -> Clip:
    """A text and its first `length` characters, cut between words."""
    if len(text) <= length * 1.2:
        return Clip(text, text)
    head = text[:length]
    return Clip(text, (head.rsplit(maxsplit=1)[0] if len(head.split()) > 1 else head) + " …")


def task_views(report: Report) -> tuple[TaskView, ...]:
    """Every task, then the pooled row, as far as they were measured."""
    return tuple(task_view(report, row) for row in task_rows(report))


def task_view(report: Report, row: TaskRow) -> TaskView:
    figures = ((label, getattr(row, name)) for name, label in TASK_FIGURES)
    return TaskView(
        row=row,
        figures=tuple((label, text) for label, text in figures if text != NOT_MEASURED),
        shares=() if row.task is None else shares(row.task, figure(report, "accuracy", row.name, "original")),
        limit=smallest_drop(row),
        flips=() if row.task is None else tuple(map(flip_view, ordered_flips(row.task))),
    )


def split_interval(text: str) -> tuple[str, str]:
    """`0.034 nats [0.031, 0.037]` as its two parts."""
    value, bracket, interval = text.partition(" [")
    return value, f"[{interval}" if bracket else ""


def shares(task: TaskPart, original: MeasurementPart | None) -> tuple[Share, ...]:
    """Both right, lost, won, both wrong; only the flips where the accuracy of the original is not known."""
    counts = {"lost": task.losses, "won": task.gains}
    if original is not None and original.value is not None:
        kept = max(0, round(original.value * task.items / 100) - task.losses)
        wrong = max(0, task.items - kept - task.losses - task.gains)
        counts = {"both right": kept} | counts | {"both wrong": wrong}
    total = sum(counts.values())
    if not total:
        return ()
    return tuple(Share(label.replace(" ", "-"), label, n, round(100 * n / total, 2)) for label, n in counts.items())


def flip_view(flip: FlipPart) -> FlipView:
    def margin(value: float | None) -> str:
        return "" if value is None else f"margin {quantity(value, 'nats', 3)}"

    right = flip.original if flip.lost else flip.result
    return FlipView(
        lost=flip.lost,
        id=flip.id,
        question=clip(flip.question),
        expected=None if right.strip() == flip.expected.strip() else clip(flip.expected),
        answers=(
            ("original", clip(flip.original), flip.lost, margin(flip.original_margin)),
            ("result", clip(flip.result), not flip.lost, margin(flip.result_margin)),
        ),
    )
