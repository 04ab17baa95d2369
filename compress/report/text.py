"""The report for a terminal. Reads well at 80 columns, without colour, and in ASCII."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from compress.report.digits import significant
from compress.report.schema import Report
from compress.report.views import (
    LeftAlone,
    SpeedTable,
    gate_rows,
    layers,
    left_alone,
    quality_rows,
    speed_ratio_table,
    speed_table,
    summary,
    worst_layers,
)

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}


def report_text(report: Report, *, report_path: str | None = None) -> RenderableType:
    """Verdict, gates, before and after, what was left alone, the worst layers, remarks, paths: in this order."""
    parts: list[RenderableType] = [verdict_lines(report)]
    if report.verdict.gates:
        parts.append(section("Gates", gate_table(report)))
    if quality_rows(report):
        parts.append(section("Original and result", quality_table(report)))
    speed = speed_table(report), speed_ratio_table(report)
    if any(table.rows for table in speed):
        parts.append(section("Speed and memory", *speed_parts(*speed)))
    if layers(report):
        parts.append(section("Layers", *layer_parts(report)))
    if report.remarks:
        parts.append(section("Remarks", bullets(report.remarks)))
    parts.append(section("Where", paths(report, report_path)))
    return Group(*parts)


def section(title: str, *body: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), *(Padding(part, (0, 0, 0, 2)) for part in body))


def verdict_lines(report: Report) -> RenderableType:
    """`PASS  0.313x size, 1.31x decode speed [1.27, 1.35], KL 0.0342 nats`, and the headline under it."""
    outcome = report.verdict.outcome
    first = Text.assemble((outcome, STYLES[outcome]), "  ", summary(report) or report.verdict.headline)
    if not summary(report):
        return first
    return Group(first, Padding(Text(report.verdict.headline), (0, 0, 0, len(outcome) + 2)))


def gate_table(report: Report) -> Table:
    table = plain_table(("verdict", "left"), ("asked", "left"), ("measured", "right"), ("interval", "left"))
    table.add_column("why", ratio=1, overflow="fold")
    table.expand = False
    for row in gate_rows(report):
        table.add_row(
            Text(row.outcome, style=STYLES[row.outcome]), row.asked, row.measured, row.interval, row.reason
        )
    return table


def quality_table(report: Report) -> Table:
    rows = quality_rows(report)
    floors = any(row.floor != "-" for row in rows)
    table = plain_table(("", "left"), ("original", "right"), ("result", "right"), ("compared", "right"))
    if floors:
        table.add_column("noise floor", justify="right")
    for row in rows:
        cells = [row.label, row.original, row.result, row.change]
        table.add_row(*map(Text, [*cells, row.floor] if floors else cells))
    return table


def speed_parts(speed: SpeedTable, ratios: SpeedTable) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for table in (speed, ratios):
        if not table.rows:
            continue
        drawn = plain_table(("", "left"), *((header, "right") for header in table.headers))
        for row in table.rows:
            drawn.add_row(*map(Text, row))
        parts.append(drawn)
    conditions = speed.conditions or ratios.conditions
    if conditions:
        parts.append(Text(f"measured with: {conditions}", style="dim"))
    return parts


def layer_parts(report: Report) -> list[RenderableType]:
    """Totals, what was left alone and why, the layers with the largest error."""
    parts: list[RenderableType] = []
    for step in report.steps:
        totals = step.totals
        line = f"{step.kind}: {totals.layers_quantized} layers done, {totals.layers_skipped} left alone"
        if totals.calibration_tokens is not None:
            line += f", {totals.calibration_tokens:,} calibration tokens"
        parts.append(Text(line))
    alone = left_alone(report)
    if alone:
        parts += [Text(), Text("left alone"), bullets(left_alone_line(group) for group in alone)]
    worst = worst_layers(report)
    if worst:
        parts += [Text(), Text("largest relative output error"), worst_table(report)]
    return parts


def left_alone_line(group: LeftAlone) -> str:
    shown = ", ".join(group.names[:4]) + (f" and {len(group.names) - 4} more" if len(group.names) > 4 else "")
    return f"{group.count} x {group.reason}: {shown}"


def worst_table(report: Report) -> Table:
    table = plain_table(("layer", "left"), ("scheme", "left"), ("by", "left"), ("error", "right"), ("rtn", "right"))
    for layer in worst_layers(report):
        cells = (layer.name, layer.scheme or layer.target or "-", layer.algorithm or "-")
        table.add_row(*map(Text, cells), error(layer.error_after), error(layer.error_before))
    return table


def error(value: float | None) -> str:
    return "-" if value is None else significant(value, 3)


def paths(report: Report, report_path: str | None) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("checkpoint", Text(report.output))
    table.add_row("report", Text(report_path or str(PurePath(report.output) / "report" / "report.json")))
    return table


def bullets(lines: Iterable[str]) -> RenderableType:
    """Lines with a hanging `-`, wrapped under themselves."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for line in lines:
        table.add_row("-", Text(line))
    return table


def plain_table(*columns: tuple[str, str]) -> Table:
    """A table with a line under its header and nothing else; cells fold instead of losing their ends."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    return table
