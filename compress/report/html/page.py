"""The report as one self-contained HTML file: no script, nothing fetched, light and dark, wide and narrow, print."""

from __future__ import annotations

from typing import Any

from compress.report.clean import defused_markup, visible
from compress.report.digits import NOT_MEASURED, quantity, significant
from compress.report.html.charts import tradeoff_svg
from compress.report.html.layer_strip import scheme_of, strips
from compress.report.html.prune_strip import prune_strips
from compress.report.html.rows import (
    definitions,
    first_rows,
    further_rows,
    measurement_rows,
    origin_rows,
    recipe_yaml,
    speed_views,
)
from compress.report.html.tradeoff import Tradeoff, tradeoff
from compress.report.html.views import gate_views, headline_parts, split_interval, task_views
from compress.report.layer_views import layer_steps, layers, left_alone, worst_layers
from compress.report.markdown import proof_rows
from compress.report.prune_views import BOUGHT_HEADERS, ERRORS_ARE, UNIT_HEADERS, prune_views
from compress.report.prune_views import LAYER_HEADERS as PRUNED_HEADERS
from compress.report.schema import LayerPart, Report
from compress.report.summary import summary

MARKS = {"PASS": "\u2713", "FAIL": "\u2717", "INCONCLUSIVE": "?"}
CHART_SIZES = {"wide": (900, 430), "narrow": (350, 400)}
LAYER_HEADERS = ("layer", "shape", "scheme", "by", "error", "round-to-nearest", "notes")
SECTIONS = {
    "gates": ("gates", "Gates"),
    "before-and-after": ("first", "Before and after"),
    "pruning": ("prunings", "Pruning"),
    "chart": ("chart", "Chart"),
    "tasks": ("tasks", "Tasks"),
    "fidelity": ("further", "Fidelity"),
    "speed": ("speed", "Speed"),
    "layers": ("strips", "Layers"),
    "remarks": ("remarks", "Remarks"),
    "proof": ("proof", "Proof"),
    "reproduce": ("report", "Reproduce"),
}
"""Where each section is, what it needs, and its name among the links."""
LISTED_LAYERS = 1000
"""Layers in the folded table; report.json has them all."""


def report_html(report: Report) -> str:
    """The page. What the report does not hold (gates, tasks, times, layers) does not appear."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("compress.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )
    environment.filters |= {"split_interval": split_interval, "percent": percent, "sentence": sentence}
    text = environment.get_template("report.html.j2").render(**context(report))
    return defused_markup(visible(text))


def context(report: Report) -> dict[str, Any]:
    """Everything the template shows."""
    chart = tradeoff(report)
    lead, reasons = headline_parts(report)
    first, further = first_rows(report), further_rows(report)
    shown = {
        "report": report,
        "marks": MARKS,
        "lead": lead,
        "reasons": reasons,
        "summary": summary(report),
        "gates": gate_views(report),
        "first": first,
        "further": further,
        "chart": chart,
        "drawings": drawings(chart),
        "tasks": task_views(report),
        "speed": speed_views(report),
        "prunings": list(zip(prune_views(report), prune_strips(report), strict=True)),
        "bought_headers": BOUGHT_HEADERS,
        "unit_headers": UNIT_HEADERS,
        "pruned_headers": PRUNED_HEADERS,
        "errors_are": ERRORS_ARE,
        "strips": strips(layer_steps(report)),
        "remarks": report.remarks,
        "layer_headers": LAYER_HEADERS,
        "worst": [layer_cells(layer) for layer in worst_layers(report)],
        "alone": left_alone(report),
        "layers": [layer_cells(layer) for layer in layers(report) if layer.skipped is None],
        "listed": LISTED_LAYERS,
        "proof": proof_rows(report.proof or {}),
        "origin": origin_rows(report),
        "recipe": recipe_yaml(report.recipe),
        "measurements": measurement_rows(report),
        "definitions": definitions(report),
    }
    return shown | {"sections": [(id, name) for id, (key, name) in SECTIONS.items() if shown[key]]}


def drawings(chart: Tradeoff | None) -> dict[str, Any]:
    """The chart for wide and for narrow screens; none without matplotlib, as its figures stand beside it in a table."""
    from markupsafe import Markup

    if chart is None:
        return {}
    try:
        return {
            name: Markup(tradeoff_svg(chart, width=width, height=height, salt=name))  # matplotlib escapes the texts
            for name, (width, height) in CHART_SIZES.items()
        }
    except (ImportError, ValueError, OSError):  # missing, broken, or with settings that it refuses itself
        return {}


def layer_cells(layer: LayerPart) -> tuple[str, ...]:
    errors = (
        NOT_MEASURED if value is None else significant(value, 3) for value in (layer.error_after, layer.error_before)
    )
    shape = " x ".join(map(str, layer.shape))
    return (layer.name, shape, scheme_of(layer), layer.algorithm or NOT_MEASURED, *errors, "; ".join(layer.notes))


def percent(value: float) -> str:
    return quantity(value, "%", 3)


def sentence(text: str) -> str:
    """With a capital where it begins, and nothing else changed."""
    return text[:1].upper() + text[1:]
