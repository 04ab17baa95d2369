"""The report as GitHub Markdown, for a pull request or a job summary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from compress.report.digits import quantity, significant
from compress.report.schema import LayerPart, MeasurementPart, Report
from compress.report.views import (
    by_scheme,
    condition,
    gate_rows,
    layers,
    left_alone,
    measured,
    ordered,
    quality_rows,
    speed_ratio_table,
    speed_table,
    summary,
    worst_layers,
)

BADGES = {"PASS": "\u2705", "FAIL": "\u274c", "INCONCLUSIVE": "\u2754"}
LAYER_HEADERS = ("layer", "shape", "scheme", "by", "error", "round-to-nearest", "notes")


def report_markdown(report: Report) -> str:
    """The whole report; long layer tables and the list of all measurements are folded."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("compress.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML: `prose` and `cell` escape what came from outside
    )
    environment.filters |= {"prose": prose, "cell": cell, "code": code}
    text = environment.get_template("report.md.j2").render(**context(report))
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def context(report: Report) -> dict[str, Any]:
    """What the template shows, as cells."""
    quality = quality_rows(report)
    floors = any(row.floor != "-" for row in quality)
    speed, ratios = speed_table(report), speed_ratio_table(report)
    return {
        "report": report,
        "badge": BADGES,
        "summary": summary(report),
        "gates": [
            (f"{BADGES[row.outcome]} {row.outcome}", Code(row.asked), row.measured, row.interval, row.reason)
            for row in gate_rows(report)
        ],
        "quality_headers": ("", "original", "result", "compared") + (("noise floor",) if floors else ()),
        "quality": [
            (row.label, row.original, row.result, row.change) + ((row.floor,) if floors else ()) for row in quality
        ],
        "speed": speed,
        "ratios": ratios,
        "conditions": speed.conditions or ratios.conditions,
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


def origin(report: Report) -> list[tuple[Any, Any]]:
    """Inputs, versions and machine as rows."""
    model = report.inputs.model
    rows: dict[str, Any] = {
        "model": Code(model.source),
        "revision": model.revision,
        "content hash": model.content_hash,
        "output": Code(report.output),
        "calibration": one_line(report.inputs.calibration),
        "evaluation": one_line(report.inputs.evaluation),
        "compress": report.tool.version,
        "written": report.created,
    }
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
    return (Code(m.metric), m.subject, value, interval, "" if m.count is None else f"{m.count:,}", conditions)


class Code(str):
    """Text for a code span."""

    __slots__ = ()


def cell(value: Any) -> str:
    """Text for a table cell: one line, no pipe that would end the cell."""
    text = code(value) if isinstance(value, Code) else prose(value)
    return text.replace("|", "\\|")


def code(value: Any) -> str:
    """A code span, fenced with more backticks than the text holds in a row."""
    text = " ".join(str(value).split())
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def prose(value: Any) -> str:
    """Plain text on one line; only what Markdown or HTML would take for markup is escaped."""
    text = " ".join(str(value).split())
    text = re.sub(r"([\\`*])", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", r"\\<", text)
    return re.sub(r"\](?=[(\[:])", r"\\]", text)
