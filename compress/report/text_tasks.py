"""The tasks of a report in a terminal: a table, what the items can show, the worst flips."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from compress.report.clean import single_line
from compress.report.schema import FlipPart, Report
from compress.report.task_views import TaskRow, ordered_flips, smallest_drops, task_rows
from compress.report.text_parts import FirstThatFits, bullets, interval_cells, plain_table, shown

MOST_FLIPS = 3
LONGEST = 70
MOST_FINER = 3
"""With more tasks than this, only the last row, all of them pooled, has its finer figures shown."""

COLUMNS = (
    ("task", "left"),
    ("items", "right"),
    ("original", "right"),
    ("result", "right"),
    ("drop", "right"),
    ("lost", "right"),
    ("won", "right"),
    ("p", "right"),
)


def task_parts(report: Report) -> list[RenderableType]:
    """Accuracies of both models, then recovery where it was measured, then limits and examples."""
    rows = task_rows(report)
    parts: list[RenderableType] = [FirstThatFits((accuracies(rows, " "), accuracies(rows, "\n")))]
    shortest = rows if len(rows) <= MOST_FINER else rows[-1:]
    finer = [f"{row.name}: {words}" for row in shortest if (words := finer_figures(row))]
    limits = smallest_drops(rows)
    if finer or limits:
        parts += [Text(" "), bullets(filter(None, [*finer, limits]))]
    shown = worst_flips(report)
    if shown:
        parts += [Text(" "), Text("answers that were lost:"), bullets(shown)]
    return parts


def accuracies(rows: tuple[TaskRow, ...], gap: str) -> Table:
    table = plain_table(*COLUMNS)
    for row in rows:
        cells = (row.name, row.items, row.original, row.result, row.drop, row.losses, row.gains, row.p)
        table.add_row(shown(cells[0]), *interval_cells(cells[1:], gap))
    return table


def finer_figures(row: TaskRow) -> str:
    """`recovery 98.5 %, above chance 97.9 %, expected drop 0.2 pt, margin shift -0.01 nats`, what there is of it."""
    figures = {
        "recovery": row.recovery,
        "above chance": row.corrected,
        "expected drop": row.expected_drop,
        "margin shift": row.margin_shift,
    }
    return ", ".join(f"{name} {value}" for name, value in figures.items() if value != "-")


def worst_flips(report: Report) -> list[str]:
    """A few lost items over all tasks, in turn, so that no task hides another."""
    columns = [[(task.name, flip) for flip in ordered_flips(task) if flip.lost] for task in report.tasks]
    longest = max(map(len, columns), default=0)
    turns = [column[i] for i in range(longest) for column in columns if i < len(column)]
    return [flip_line(name, flip) for name, flip in turns[:MOST_FLIPS]]


def flip_line(task: str, flip: FlipPart) -> str:
    question, answer = shortened(flip.question), shortened(flip.result)
    return f"{task} {flip.id}: {question} -> {answer} instead of {shortened(flip.original)}"


def shortened(text: str) -> str:
    """On one line, with its middle left out where it is long: the end of a question is where the answer starts."""
    line = single_line(text)
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
