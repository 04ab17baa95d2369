"""The report for a terminal. Reads well at 80 columns, without colour, and in ASCII."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compress.report.digits import NOT_MEASURED, significant
from compress.report.layer_views import by_scheme, layer_steps, layers, left_alone, worst_layers
from compress.report.prune_views import BOUGHT_HEADERS, ERRORS_ARE, UNIT_HEADERS, PruneView, prune_views
from compress.report.schema import Report
from compress.report.speed_views import SpeedTable, speed_tables
from compress.report.summary import summary
from compress.report.text_parts import FirstThatFits, bullets, interval_cells, plain_table, section, shown
from compress.report.text_tasks import task_parts
from compress.report.views import QualityRow, gate_rows, generation_rows, quality_rows, serving_line

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}


def report_text(report: Report, *, report_path: str | None = None) -> RenderableType:
    """Verdict, gates, before and after, tasks, speed, what was left alone, remarks, paths: in this order."""
    parts: list[RenderableType] = [verdict_lines(report)]
    if report.verdict.gates:
        parts.append(section("Gates", *gate_parts(report)))
    if rows := quality_rows(report):
        parts.append(section("Original and result", quality_table(rows)))
    parts += [section("Pruning", *prune_parts(view)) for view in prune_views(report)]
    if report.tasks:
        parts.append(section("Tasks", *task_parts(report)))
    if rows := generation_rows(report):
        parts.append(section("Generated answers", quality_table(rows)))
    if tables := speed_tables(report):
        parts.append(section("Speed and memory", *speed_parts(tables)))
    if layers(report):
        parts.append(section("Layers", *layer_parts(report)))
    if report.remarks:
        parts.append(section("Remarks", bullets(report.remarks)))
    parts.append(section("Result", paths(report, report_path)))
    return Group(*parts)


def verdict_lines(report: Report) -> RenderableType:
    """The headline (a failing gate is named in it), and under it what the run bought and what it cost."""
    headline = shown(report.verdict.headline)
    headline.highlight_words([report.verdict.outcome], STYLES[report.verdict.outcome])
    figures = summary(report)
    return Group(headline, shown(figures)) if figures else headline


def gate_parts(report: Report) -> list[RenderableType]:
    """The gates as a table, and the reasons that the headline does not already give."""
    table = plain_table(("verdict", "left"), ("asked", "left"), ("measured", "right"), ("interval", "left"))
    lines = any(row.line for row in gate_rows(report))
    if lines:
        table.add_column("recipe", justify="right")
    for row in gate_rows(report):
        outcome = shown(row.outcome, style=STYLES[row.outcome])
        cells = (row.asked, row.measured, row.interval)
        table.add_row(outcome, *map(shown, (*cells, row.line) if lines else cells))
    open_reasons = [
        f"{row.asked}: {row.reason}"
        for row in gate_rows(report)
        if row.outcome != "PASS" and row.reason not in report.verdict.headline
    ]
    return [table, bullets(open_reasons)] if open_reasons else [table]


def quality_table(rows: Sequence[QualityRow]) -> RenderableType:
    """Intervals beside their values where there is room for it, else under them."""
    return FirstThatFits((quality_columns(rows, " "), quality_columns(rows, "\n")))


def quality_columns(rows: Sequence[QualityRow], gap: str) -> Table:
    floors = any(row.floor != NOT_MEASURED for row in rows)
    table = plain_table(("", "left"), ("original", "right"), ("result", "right"), ("compared", "right"))
    if floors:
        table.add_column("noise floor", justify="right")
    for row in rows:
        cells = [row.label, row.original, row.result, row.change]
        table.add_row(*interval_cells([*cells, row.floor] if floors else cells, gap))
    return table


def speed_parts(tables: Sequence[SpeedTable]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for table in tables:
        if parts:
            parts.append(Text(" "))
        parts.append(FirstThatFits((speed_columns(table, " "), speed_columns(table, "\n"))))
    if tables[0].conditions:
        parts.append(shown(f"measured with: {tables[0].conditions}", style="dim"))
    return parts


def speed_columns(table: SpeedTable, gap: str) -> Table:
    drawn = plain_table((table.headers[0], "left"), *((header, "right") for header in table.headers[1:]))
    for row in table.rows:
        drawn.add_row(*interval_cells(row, gap))
    return drawn


def prune_parts(view: PruneView) -> list[RenderableType]:
    """How it was done, what it bought, where it hurt, and what else was tried."""
    parts: list[RenderableType] = [shown(view.title)]
    parts += [shown(view.removed)] if view.removed else []
    parts += [Text(" "), FirstThatFits((plain_rows(view.bought, " "), plain_rows(view.bought, "\n")))]
    if view.units:
        parts += [Text(" "), unit_table(view), shown(ERRORS_ARE, style="dim")]
    if view.tried:
        parts += [Text(" "), shown("shapes that were tried:"), fields(view.tried_headers, view.tried, left=0)]
    return parts


def unit_table(view: PruneView) -> RenderableType:
    """A table, or where that is too wide a line for each kind of projection."""
    lines = (
        f"{name}: {kept}; " + ", ".join(f"{header} {cell}" for header, cell in zip(UNIT_HEADERS[2:], rest, strict=True))
        for name, kept, *rest in view.units
    )
    return FirstThatFits((fields(UNIT_HEADERS, view.units, left=2), bullets(lines)))


def plain_rows(rows: Sequence[Sequence[str]], gap: str) -> Table:
    return fields(BOUGHT_HEADERS, [interval_cells(row, gap) for row in rows], left=1)


def fields(headers: Sequence[str], rows: Sequence[Sequence[str | Text]], *, left: int) -> Table:
    """A table whose first `left` columns are words."""
    table = plain_table(*((name, "left" if index < left else "right") for index, name in enumerate(headers)))
    for row in rows:
        table.add_row(*(shown(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def layer_parts(report: Report) -> list[RenderableType]:
    """Totals, what was left alone and why, the layers with the largest error."""
    parts: list[RenderableType] = []
    for step in layer_steps(report):
        totals = step.totals
        line = f"{step.kind}: {totals.layers_quantized} layers done, {totals.layers_skipped} left alone"
        if totals.calibration_tokens is not None:
            line += f", {totals.calibration_tokens:,} calibration tokens"
        parts.append(shown(line))
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
        table.add_row(*map(shown, cells), error(layer.error_after), error(layer.error_before))
    return table


def error(value: float | None) -> str:
    return "-" if value is None else significant(value, 3)


def paths(report: Report, report_path: str | None) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if report.proof is not None:
        table.add_row("proof", shown(proof_line(report.proof)))
    for engine in report.serving:
        table.add_row(engine.engine, shown(serving_line(engine)))
    table.add_row("checkpoint", shown(report.output))
    table.add_row("report", shown(report_path or str(PurePath(report.output) / "report")))
    return table


def proof_line(proof: Mapping[str, Any]) -> str:
    """`transformers 5.24.0 in a fresh process: 6 checks passed, KL 3.10e-09 nats over 512 tokens`."""
    parts = [f"{len(proof['checks'])} checks passed"] if "checks" in proof else []
    if proof.get("kl_mean") is not None:
        parts.append(f"KL {significant(proof['kl_mean'], 3)} nats over {proof.get('tokens', 0):,} tokens")
    return f"{proof.get('method', 'loaded')} in a fresh process: {', '.join(parts)}"
