"""Pieces of a report in a terminal: sections, tables that fit, lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement as Width
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LONGEST = 2000
"""Characters of one text: wrapping takes time that grows with it."""


def shown(text: str, style: str = "") -> Text:
    """Text that is no markup; what is longer than anybody reads in a terminal ends in an ellipsis."""
    return Text(text if len(text) <= LONGEST else f"{text[:LONGEST]}...", style=style)


def section(title: str, *body: RenderableType) -> RenderableType:
    indented = (Padding(part, (0, 0, 0, 2), expand=False) for part in body)
    return Group(Text(), Text(title, style="bold"), *indented)


def interval_cells(cells: Iterable[str], gap: str) -> list[Text]:
    """Cells with `gap` between a value and its interval."""
    return [shown(cell.replace(" [", f"{gap}[")) for cell in cells]


@dataclass(frozen=True)
class FirstThatFits:
    """Shows the first of several renderings that is not too wide, else the last."""

    choices: tuple[RenderableType, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=10_000)
        fitting = (c for c in self.choices if Width.get(console, unlimited, c).maximum <= options.max_width)
        yield next(fitting, self.choices[-1])


def bullets(lines: Iterable[str]) -> RenderableType:
    """Lines with a hanging `-`, wrapped under themselves."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for line in lines:
        table.add_row("-", shown(line))
    return table


def plain_table(*columns: tuple[str, str]) -> Table:
    """A table with a line under its header and nothing else; cells fold instead of losing their ends."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    return table
