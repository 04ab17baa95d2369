"""The report as GitHub Markdown, for a pull request or a job summary.

A comment may have 64 KiB and a step summary 1 MiB. What is long is folded; where the whole would be longer than
MOST_BYTES, tables end earlier and say so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.report.digits import NOT_MEASURED, quantity, significant
from compress.report.layer_views import by_scheme, layer_steps, layers, left_alone, worst_layers
from compress.report.markdown_text import Code, block, cell, code, html_code, prose, shortened
from compress.report.prune_views import BOUGHT_HEADERS, ERRORS_ARE, UNIT_HEADERS, prune_views
from compress.report.prune_views import LAYER_HEADERS as PRUNED_HEADERS
from compress.report.schema import FlipPart, LayerPart, MeasurementPart, Report
from compress.report.speed_views import speed_tables
from compress.report.summary import summary
from compress.report.task_views import TaskRow, ordered_flips, smallest_drops, task_rows
from compress.report.views import (
    GateRow,
    QualityRow,
    condition,
    gate_rows,
    generation_rows,
    measured,
    ordered,
    quality_rows,
    serving_line,
)

if TYPE_CHECKING:
    from jinja2 import Template

MOST_BYTES = 60 * 1024
MARKER = "<!-- compress-report -->"
"""The first line, by which a CI job finds its comment of the last push and replaces it."""
BADGES = {"PASS": "\u2705", "FAIL": "\u274c", "INCONCLUSIVE": "\u2754"}
LAYER_HEADERS = ("layer", "shape", "scheme", "by", "error", "round-to-nearest", "notes")
TASK_HEADERS = ("Tasks", "Metric", "Items", "original", "result", "drop", "lost", "won", "p")
FINER_HEADERS = ("recovery", "above chance", "smallest drop to find")
FLIP_HEADERS = ("", "id", "question", "expected", "original", "result", "margins")
CUT = "\n\n*Cut here: the whole report is in report.json and report.html.*\n"


@dataclass(frozen=True)
class Detail:
    """How much is shown: rows of a table, layers, measurements, flips of a task, characters of a text."""

    rows: int
    layers: int
    measurements: int
    flips: int
    text: int


DETAILS = (
    Detail(rows=1000, layers=1000, measurements=1000, flips=10, text=1000),
    Detail(rows=200, layers=300, measurements=150, flips=10, text=200),
    Detail(rows=100, layers=60, measurements=100, flips=5, text=120),
    Detail(rows=50, layers=20, measurements=30, flips=2, text=80),
    Detail(rows=20, layers=0, measurements=0, flips=0, text=60),
)


def report_markdown(report: Report) -> str:
    """The report in as much detail as MOST_BYTES hold."""
    shown = context(report)
    for detail in DETAILS:
        text = rendered(shown, detail)
        if len(text.encode()) <= MOST_BYTES:
            return text
    return cut(text)


def rendered(shown: Mapping[str, Any], detail: Detail) -> str:
    text = template(detail).render(**shown, detail=detail)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def template(detail: Detail) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("compress.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML: the filters escape what came from outside
    )
    for filter in (prose, cell, code, html_code):
        environment.filters[filter.__name__] = partial(escaped, filter, detail.text)
    environment.filters["block"] = block
    return environment.get_template("report.md.j2")


def escaped(escape: Any, most: int, value: Any) -> str:
    return str(escape(shortened(value, most)))


def cut(text: str) -> str:
    """Whole lines as far as they fit, what they opened closed again."""
    kept = text.encode()[: MOST_BYTES - 200].decode(errors="ignore").rpartition("\n")[0]
    still_open = max(0, kept.count("<details>") - kept.count("</details>"))
    return kept + "\n\n</details>" * still_open + CUT


def context(report: Report) -> dict[str, Any]:
    """What the template shows, as cells."""
    tables = speed_tables(report)
    tasks = task_rows(report)
    lines = any(row.line for row in gate_rows(report))
    return {
        "marker": MARKER,
        "report": report,
        "badge": BADGES,
        "summary": summary(report),
        "gate_headers": ("verdict", "asked", "measured", "interval", "why", *(("recipe",) if lines else ())),
        "gates": [gate_cells(row) + ((row.line,) if lines else ()) for row in gate_rows(report)],
        "quality": compared(quality_rows(report)),
        "prunings": prune_views(report),
        "bought_headers": BOUGHT_HEADERS,
        "unit_headers": UNIT_HEADERS,
        "pruned_headers": PRUNED_HEADERS,
        "errors_are": ERRORS_ARE,
        "steps": layer_steps(report),
        "task_headers": TASK_HEADERS + FINER_HEADERS,
        "tasks": [task_cells(row) for row in tasks],
        "limits": smallest_drops(tasks),
        "flip_headers": FLIP_HEADERS,
        "flips": [(task, [flip_cells(flip) for flip in ordered_flips(task)]) for task in report.tasks if task.flips],
        "generation": compared(generation_rows(report)),
        "speed": tables,
        "conditions": tables[0].conditions if tables else "",
        "layers": [layer_cells(layer) for layer in layers(report) if layer.skipped is None],
        "worst": [layer_cells(layer) for layer in worst_layers(report)],
        "layer_headers": LAYER_HEADERS,
        "mix": by_scheme(report),
        "alone": left_alone(report),
        "proof": proof_rows(report.proof or {}),
        "origin": origin(report),
        "measurements": [measurement_cells(m) for m in report.measurements],
        "definitions": {m.metric: m.definition for m in report.measurements},
    }


def gate_cells(row: GateRow) -> tuple[Any, ...]:
    return (f"{BADGES[row.outcome]} {row.outcome}", Code(row.asked), row.measured, row.interval, row.reason)


def compared(rows: Sequence[QualityRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and cells; the noise floor only where one was measured."""
    floors = any(row.floor != NOT_MEASURED for row in rows)
    headers = ("", "original", "result", "compared", *(("noise floor",) if floors else ()))
    cells = [(row.label, row.original, row.result, row.change, *((row.floor,) if floors else ())) for row in rows]
    return headers, cells


def task_cells(row: TaskRow) -> tuple[Any, ...]:
    name = Code(row.name) if row.task is not None else row.name
    figures = (row.items, row.original, row.result, row.drop, row.losses, row.gains, row.p)
    return (name, row.metric, *figures, row.recovery, row.corrected, row.detectable)


def flip_cells(flip: FlipPart) -> tuple[Any, ...]:
    """Questions and answers are code: whatever is in them stays text."""
    known = (flip.original_margin, flip.result_margin)
    margins = " -> ".join(NOT_MEASURED if value is None else significant(value, 3) for value in known)
    texts = (flip.id, flip.question, flip.expected, flip.original, flip.result)
    return ("lost" if flip.lost else "won", *map(Code, texts), "" if known == (None, None) else margins)


def origin(report: Report) -> list[tuple[Any, Any]]:
    """Inputs, versions and machine as rows."""
    model, result = report.inputs.model, report.inputs.result
    rows: dict[str, Any] = {
        "model": Code(model.source),
        "revision": Code(model.revision or ""),
        "content hash": Code(model.content_hash or ""),
        "result": "" if result is None else Code(result.source),
        "output": Code(report.output),
        "calibration": one_line(report.inputs.calibration),
        "evaluation": one_line(report.inputs.evaluation),
        "compress": report.tool.version,
        "written": report.created,
    }
    rows |= {engine.engine: serving_line(engine) for engine in report.serving}
    rows |= {key.replace("_", " "): one_line(value) for key, value in report.environment.items()}
    return [(key, value) for key, value in rows.items() if value not in (None, "")]


def proof_rows(proof: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The proof's figures, then its checks one by one."""
    rows = [(k.replace("_", " "), one_line(v)) for k, v in proof.items() if k != "checks" and v is not None]
    checks = [(c["name"], f"{'passed' if c['passed'] else 'FAILED'}: {c['detail']}") for c in proof.get("checks", ())]
    return rows + checks


def one_line(value: Any) -> str:
    """A nested value on one line: `torch 2.13.0, transformers 5.24.0`."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {one_line(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return ", ".join(one_line(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else significant(value, 4)
    return str(value)


def layer_cells(layer: LayerPart) -> tuple[Any, ...]:
    errors = ("-" if value is None else significant(value, 3) for value in (layer.error_after, layer.error_before))
    shape = " x ".join(map(str, layer.shape))
    scheme = layer.scheme or layer.target or "-"
    return (Code(layer.name), shape, scheme, layer.algorithm or "-", *errors, "; ".join(layer.notes))


def measurement_cells(m: MeasurementPart) -> tuple[Any, ...]:
    interval = f"{m.interval.level:.0%}, {m.interval.method}" if m.interval else ""
    conditions = ", ".join(condition(key, one_line(m.conditions[key])) for key in ordered(m.conditions))
    value = measured(m) if m.value is not None else f"{quantity(None, m.unit)} ({m.note})"
    task = "" if m.task is None else Code(m.task)
    return (Code(m.metric), m.subject, task, value, interval, "" if m.count is None else f"{m.count:,}", conditions)
