"""The report for a terminal. Reads well at 80 columns, without colour, and in ASCII."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement as Width
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from compress.report.digits import significant
from compress.report.schema import Report
from compress.report.views import (
    SpeedTable,
    by_scheme,
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
        parts.append(section("Gates", *gate_parts(report)))
    if quality_rows(report):
        parts.append(section("Original and result", quality_table(report)))
    speed = speed_table(report), speed_ratio_table(report)
    if any(table.rows for table in speed):
        parts.append(section("Speed and memory", *speed_parts(*speed)))
    if layers(report):
        parts.append(section("Layers", *layer_parts(report)))
    if report.remarks:
        parts.append(section("Remarks", bullets(report.remarks)))
    parts.append(section("Result", paths(report, report_path)))
    return Group(*parts)


def section(title: str, *body: RenderableType) -> RenderableType:
    indented = (Padding(part, (0, 0, 0, 2), expand=False) for part in body)
    return Group(Text(), Text(title, style="bold"), *indented)


def verdict_lines(report: Report) -> RenderableType:
    """The headline (a failing gate is named in it), and under it what the run bought and what it cost."""
    headline = Text(report.verdict.headline)
    headline.highlight_words([report.verdict.outcome], STYLES[report.verdict.outcome])
    figures = summary(report)
    return Group(headline, Text(figures)) if figures else headline


def gate_parts(report: Report) -> list[RenderableType]:
    """The gates as a table, and the reasons that the headline does not already give."""
    table = plain_table(("verdict", "left"), ("asked", "left"), ("measured", "right"), ("interval", "left"))
    lines = any(row.line for row in gate_rows(report))
    if lines:
        table.add_column("recipe", justify="right")
    for row in gate_rows(report):
        outcome = Text(row.outcome, style=STYLES[row.outcome])
        cells = (row.asked, row.measured, row.interval)
        table.add_row(outcome, *map(Text, (*cells, row.line) if lines else cells))
    open_reasons = [
        f"{row.asked}: {row.reason}"
        for row in gate_rows(report)
        if row.outcome != "PASS" and row.reason not in report.verdict.headline
    ]
    return [table, bullets(open_reasons)] if open_reasons else [table]


def quality_table(report: Report) -> RenderableType:
    """Intervals beside their values where there is room for it, else under them."""
    return FirstThatFits((quality_columns(report, " "), quality_columns(report, "\n")))


def quality_columns(report: Report, gap: str) -> Table:
    rows = quality_rows(report)
    floors = any(row.floor != "-" for row in rows)
    table = plain_table(("", "left"), ("original", "right"), ("result", "right"), ("compared", "right"))
    if floors:
        table.add_column("noise floor", justify="right")
    for row in rows:
        cells = [row.label, row.original, row.result, row.change]
        table.add_row(*interval_cells([*cells, row.floor] if floors else cells, gap))
    return table


def interval_cells(cells: Iterable[str], gap: str) -> list[Text]:
    """Cells with `gap` between a value and its interval."""
    return [Text(cell.replace(" [", f"{gap}[")) for cell in cells]


@dataclass(frozen=True)
class FirstThatFits:
    """Shows the first of several renderings that is not too wide, else the last."""

    choices: tuple[RenderableType, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=10_000)
        fitting = (c for c in self.choices if Width.get(console, unlimited, c).maximum <= options.max_width)
        yield next(fitting, self.choices[-1])


def speed_parts(speed: SpeedTable, ratios: SpeedTable) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for table in (speed, ratios):
        if not table.rows:
            continue
        if parts:
            parts.append(Text(" "))
        parts.append(FirstThatFits((speed_columns(table, " "), speed_columns(table, "\n"))))
    conditions = speed.conditions or ratios.conditions
    if conditions:
        parts.append(Text(f"measured with: {conditions}", style="dim"))
    return parts


def speed_columns(table: SpeedTable, gap: str) -> Table:
    drawn = plain_table((table.headers[0], "left"), *((header, "right") for header in table.headers[1:]))
    for row in table.rows:
        drawn.add_row(*interval_cells(row, gap))
    return drawn


def layer_parts(report: Report) -> list[RenderableType]:
    """Totals, what was left alone and why, the layers with the largest error."""
    parts: list[RenderableType] = []
    for step in report.steps:
        totals = step.totals
        line = f"{step.kind}: {totals.layers_quantized} layers done, {totals.layers_skipped} left alone"
        if totals.calibration_tokens is not None:
            line += f", {totals.calibration_tokens:,} calibration tokens"
        parts.append(Text(line))
    mix = by_scheme(report)
    if mix:
        parts += [Text(" "), bullets(group_line(group.count, group.scheme, group.names) for group in mix)]
    alone = left_alone(report)
    if alone:
        parts += [Text(" "), Text("left alone:")]
        parts.append(bullets(group_line(group.count, group.reason, group.names) for group in alone))
    worst = worst_layers(report)
    if worst:
        parts += [Text(" "), Text("largest relative output error (rtn: that of plain rounding):"), worst_table(report)]
    return parts


def group_line(count: int, what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{count} x {what}: {shown}"


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
    if report.proof is not None:
        table.add_row("proof", Text(proof_line(report.proof)))
    table.add_row("checkpoint", Text(report.output))
    table.add_row("report", Text(report_path or str(PurePath(report.output) / "report")))
    return table


def proof_line(proof: Mapping[str, Any]) -> str:
    """`transformers 5.24.0 in a fresh process: 6 checks passed, KL 3.10e-09 nats over 512 tokens`."""
    parts = [f"{len(proof['checks'])} checks passed"] if "checks" in proof else []
    if proof.get("kl_mean") is not None:
        parts.append(f"KL {significant(proof['kl_mean'], 3)} nats over {proof.get('tokens', 0):,} tokens")
    return f"{proof.get('method', 'loaded')} in a fresh process: {', '.join(parts)}"


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
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    return table
