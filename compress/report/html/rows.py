"""The tables of the HTML report: before and after, speed, origins, and every measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compress.report.digits import NOT_MEASURED
from compress.report.markdown import one_line
from compress.report.schema import MeasurementPart, ModelPart, Report
from compress.report.speed_views import SpeedTable, speed_rows, speed_tables
from compress.report.task_views import accuracy_rows
from compress.report.views import (
    QUALITY_LABELS,
    QualityRow,
    compared_rows,
    condition,
    generation_rows,
    measured,
    ordered,
    serving_line,
)

SIZES = ("size", "parameters", "kv_bytes", "bits_per_weight")
FIRST = (*SIZES, "perplexity", "kl.mean", "top1.agreement", "cosine.mean", "ndcg")
"""Metrics that stand among before and after; the others follow further down."""
COLUMNS = 7
"""As many as a page has room for."""
CHANGING = ("seed", "contention")
"""Conditions of a measurement that a reader looks for among the origins."""


def first_rows(report: Report) -> tuple[QualityRow, ...]:
    """Before and after: sizes, distances, accuracy, and the times and memory of the fairest comparison."""
    labels = {metric: QUALITY_LABELS[metric] for metric in FIRST}
    return told((*compared_rows(report, labels), *accuracy_rows(report), *speed_rows(report)))


def further_rows(report: Report) -> tuple[QualityRow, ...]:
    """The rest of fidelity, and what generated answers look like."""
    labels = {metric: label for metric, label in QUALITY_LABELS.items() if metric not in FIRST}
    return told((*compared_rows(report, labels), *generation_rows(report)))


def told(rows: Iterable[QualityRow]) -> tuple[QualityRow, ...]:
    """Rows that say something; why the others do not is among the remarks."""
    return tuple(row for row in rows if {row.original, row.result, row.change, row.floor} != {NOT_MEASURED})


def speed_views(report: Report) -> tuple[SpeedTable, ...]:
    """Times, then ratios; tables with the same rows side by side as one, as far as a page has room."""
    joined: list[SpeedTable] = []
    for table in sorted(speed_tables(report), key=lambda table: bool(table.headers[0])):
        last = joined[-1] if joined else None
        if last is not None and fits(last, table):
            rows = tuple((*a, *b[1:]) for a, b in zip(last.rows, table.rows, strict=True))
            joined[-1] = SpeedTable((*last.headers, *table.headers[1:]), rows, last.conditions or table.conditions)
        else:
            joined.append(table)
    return tuple(joined)


def fits(left: SpeedTable, right: SpeedTable) -> bool:
    names = [[row[0] for row in table.rows] for table in (left, right)]
    columns = len(left.headers) + len(right.headers) - 1
    return names[0] == names[1] and left.headers[0] == right.headers[0] and columns <= COLUMNS


def origin_rows(report: Report) -> tuple[tuple[str, str], ...]:
    """Inputs with their hashes, seeds, software and machine."""
    rows = model_rows("original", report.inputs.model)
    if report.inputs.result is not None:
        rows |= model_rows("result", report.inputs.result)
    rows |= {name: one_line(getattr(report.inputs, name)) for name in ("calibration", "evaluation")}
    rows |= {f"task {t.name}": f"{t.source}" + (f", SHA-256 {t.sha256}" if t.sha256 else "") for t in report.tasks}
    rows |= {key: seen_conditions(report.measurements, key) for key in CHANGING}
    if report.recipe and report.recipe.get("seed") is not None:
        rows["seed"] = one_line(report.recipe["seed"])
    rows |= {"compress": report.tool.version, "written": report.created or ""}
    rows |= {engine.engine: serving_line(engine) for engine in report.serving}
    rows |= {key.replace("_", " "): one_line(value) for key, value in report.environment.items()}
    return tuple((key, value) for key, value in rows.items() if value)


def model_rows(name: str, model: ModelPart) -> dict[str, str]:
    rows = {name: model.source, f"{name}, revision": model.revision, f"{name}, SHA-256": model.content_hash}
    return {key: value for key, value in rows.items() if value is not None}


def seen_conditions(measurements: Iterable[MeasurementPart], key: str) -> str:
    """All values of a condition, in the order they occur."""
    values = (one_line(m.conditions[key]) for m in measurements if m.conditions.get(key) is not None)
    return "; ".join(dict.fromkeys(values))


def measurement_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    """Metric, task, subject, value, how the interval was made, count, conditions and note of every measurement."""
    return tuple(
        (
            m.metric,
            m.task or "",
            m.subject,
            measured(m),
            f"{m.interval.level:.0%}, {m.interval.method}" if m.interval else "",
            "" if m.count is None else f"{m.count:,}",
            "; ".join(filter(None, (conditions_line(m.conditions), m.note))),
        )
        for m in report.measurements
    )


def conditions_line(conditions: Mapping[str, Any]) -> str:
    return ", ".join(condition(key, one_line(conditions[key])) for key in ordered(conditions))


def definitions(report: Report) -> tuple[tuple[str, str], ...]:
    """Id and text of every definition that a measurement of this report names."""
    return tuple({m.definition_id: m.definition for m in report.measurements}.items())


def recipe_yaml(recipe: Mapping[str, Any] | None) -> str:
    """The resolved recipe as YAML; empty where there was none."""
    import io

    from ruamel.yaml import YAML

    if not recipe:
        return ""
    stream, yaml = io.StringIO(), YAML()
    yaml.default_flow_style = False
    yaml.allow_unicode = False
    yaml.dump(dict(recipe), stream)
    return stream.getvalue()
