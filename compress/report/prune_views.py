"""What pruning did and what it bought, as text in cells: what terminal, Markdown and HTML all show, chosen once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from compress.report.digits import NOT_MEASURED, quantity, significant
from compress.report.layer_views import PRUNE
from compress.report.schema import LayerPart, Report, StepPart
from compress.report.speed_views import speed_rows
from compress.report.task_views import accuracy_rows
from compress.report.views import QualityRow, compared_rows

SHAPE = {"ffn": "FFN width", "heads": "query heads", "kv_heads": "KV heads", "layers": "layers"}
UNITS = {"ffn": "FFN channels", "heads": "query heads", "kv_heads": "KV heads"}
SIZES = {"parameters": "parameters", "size": "weight files", "kv_bytes": "KV cache per token"}
QUALITY = {"perplexity": "perplexity", "cosine.mean": "cosine, mean"}
BOUGHT_HEADERS = ("", "original", "result", "compared")
UNIT_HEADERS = ("projections", "units kept", "masked", "fitted", "predicted", "worst fitted")
TRIED_HEADERS = ("FFN", "heads", "KV heads", "layers", "parameters", "MB")
LAYER_HEADERS = ("layer", "shape", "units kept", "masked", "fitted", "predicted", "notes")
ERRORS_ARE = (
    "Squared error of what a projection adds up, relative to its output, on held-out tokens: columns removed and "
    "nothing else (masked), then with the others fitted, and what the fit expected; medians over the layers"
)

TOGETHER = "; sizes, times and accuracy are those of all steps together"


@dataclass(frozen=True)
class PruneView:
    """One step that pruned.

    Attributes:
        title: how units were chosen, and from how much text.
        shape: rows under BOUGHT_HEADERS, one for each kind of unit.
        bought: these and what the whole run made of sizes, times and accuracy.
        removed: the layers that went, as a sentence; empty if none did.
        units: rows under UNIT_HEADERS, one for each kind of projection.
        tried_headers, tried: the candidates of a search and which was chosen; no rows where none ran.
        layers: rows under LAYER_HEADERS, one for each projection.
    """

    title: str
    shape: tuple[tuple[str, ...], ...]
    bought: tuple[tuple[str, ...], ...]
    removed: str
    units: tuple[tuple[str, ...], ...]
    tried_headers: tuple[str, ...]
    tried: tuple[tuple[str, ...], ...]
    layers: tuple[tuple[str, ...], ...]


def prune_views(report: Report) -> tuple[PruneView, ...]:
    return tuple(
        PruneView(
            title=title(step) + (TOGETHER if len(report.steps) > 1 else ""),
            shape=shape_rows(step),
            bought=(*shape_rows(step), *map(cells, bought_rows(report))),
            removed=removed_line(step),
            units=unit_rows(pruned_layers(step)),
            tried_headers=(*TRIED_HEADERS, f"{distance_name(step)}, held out", ""),
            tried=tried_rows(step),
            layers=tuple(map(layer_row, pruned_layers(step))),
        )
        for step in prune_steps(report)
    )


def prune_steps(report: Report) -> tuple[StepPart, ...]:
    return tuple(step for step in report.steps if step.kind == PRUNE)


def title(step: StepPart) -> str:
    """`units chosen by obs, the remaining weights fitted, 32,768 calibration tokens`."""
    parts = [f"units chosen by {step.settings.get('importance', 'an unknown score')}"]
    parts.append("the remaining weights fitted" if step.settings.get("compensate") else "no weight fitted")
    tokens = step.totals.calibration_tokens
    return ", ".join(parts + ([] if tokens is None else [f"{tokens:,} calibration tokens"]))


def cells(row: QualityRow) -> tuple[str, ...]:
    return (row.label, row.original, row.result, row.change)


def shape_rows(step: StepPart) -> tuple[tuple[str, ...], ...]:
    """All four kinds, also what stayed whole."""
    before, after = shape_of(step, "before"), shape_of(step, "after")
    return tuple(
        (label, f"{before[name]:,}", f"{after[name]:,}", quantity(after[name] / before[name], "x"))
        for name, label in SHAPE.items()
        if before.get(name) and name in after
    )


def shape_of(step: StepPart, name: str) -> dict[str, int]:
    return counts(step.settings.get(name))


def counts(found: Any) -> dict[str, int]:
    """The kinds of a shape whose count is known."""
    known = found if isinstance(found, Mapping) else {}
    return {kind: known[kind] for kind in SHAPE if type(known.get(kind)) is int}


def bought_rows(report: Report) -> list[QualityRow]:
    """Sizes, times and what it cost; of the whole run, all steps together."""
    rows = (*compared_rows(report, SIZES), *speed_rows(report), *compared_rows(report, QUALITY), *accuracy_rows(report))
    return [row for row in rows if {row.original, row.result, row.change} != {NOT_MEASURED}]


def removed_layers(step: StepPart) -> tuple[int, ...]:
    """Indices in the original."""
    kept, before = step.settings.get("layers_kept"), shape_of(step, "before")
    if not isinstance(kept, list | tuple):
        return ()
    return tuple(index for index in range(before.get("layers", 0)) if index not in kept)


def removed_line(step: StepPart) -> str:
    """`layers removed: 2 of 30 (20, 21, counted from 0)`."""
    gone, before = removed_layers(step), shape_of(step, "before").get("layers")
    return f"layers removed: {len(gone)} of {before} ({', '.join(map(str, gone))}, counted from 0)" if gone else ""


def pruned_layers(step: StepPart) -> tuple[LayerPart, ...]:
    return tuple(layer for layer in step.layers if layer.pruning is not None)


def unit_rows(layers: Sequence[LayerPart]) -> tuple[tuple[str, ...], ...]:
    """Medians over all layers of a kind, and the layer with the largest error."""
    groups: dict[tuple[str, str, int, int], list[LayerPart]] = {}
    for layer in layers:
        if layer.pruning is not None:
            key = (last_part(layer.name), layer.pruning.unit, len(layer.pruning.kept), layer.pruning.of)
            groups.setdefault(key, []).append(layer)
    return tuple(
        (f"{len(members)} x {name}", kept_of(members[0]), *(middle(members, which) for which in ERRORS), worst(members))
        for (name, *_), members in groups.items()
    )


ERRORS = ("error_masked", "error_measured", "error_predicted")


def last_part(name: str) -> str:
    """`mlp.down_proj` of `model.layers.3.mlp.down_proj`."""
    parts = name.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbered[-1] + 1 :]) if numbered and numbered[-1] + 1 < len(parts) else name


def kept_of(layer: LayerPart) -> str:
    """`1,152 of 1,536 FFN channels`."""
    found = layer.pruning
    return "" if found is None else f"{len(found.kept):,} of {found.of:,} {UNITS.get(found.unit, found.unit)}"


def values(layers: Iterable[LayerPart], which: str) -> list[float]:
    found = (getattr(layer.pruning, which) for layer in layers)
    return [value for value in found if value is not None]


def middle(layers: Iterable[LayerPart], which: str) -> str:
    known = values(layers, which)
    return significant(median(known), 3) if known else NOT_MEASURED


def worst(layers: Sequence[LayerPart]) -> str:
    """`0.213 in layer 29`."""
    known = [(value, layer) for layer in layers for value in values([layer], "error_measured")]
    if not known:
        return NOT_MEASURED
    value, layer = max(known, key=lambda pair: pair[0])
    block = [part for part in layer.name.split(".") if part.isdigit()][:1]
    return significant(value, 3) + (f" in layer {block[0]}" if block else "")


def distance_name(step: StepPart) -> str:
    """What a search ordered its candidates by."""
    metric = step.settings.get("search_metric", "kl")
    return "KL" if metric == "kl" else str(metric)


def tried_rows(step: StepPart) -> tuple[tuple[str, ...], ...]:
    """The candidates of a search, in the order in which they were tried."""
    found, chosen = step.settings.get("search"), shape_of(step, "after")
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list | tuple) else []
    return tuple(
        (
            *(f"{shape[kind]:,}" if kind in shape else NOT_MEASURED for kind in SHAPE),
            number(row.get("parameters"), 1, ",.0f"),
            number(row.get("bytes"), 1e6, ",.1f"),
            NOT_MEASURED if not known(row.get("divergence")) else significant(row["divergence"], 4),
            "chosen" if shape == chosen else "",
        )
        for row in rows
        for shape in [counts(row)]
    )


def known(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any, unit: float, form: str) -> str:
    return format(value / unit, form) if known(value) else NOT_MEASURED


def layer_row(layer: LayerPart) -> tuple[str, ...]:
    found = layer.pruning
    errors = (None if found is None else getattr(found, which) for which in ERRORS)
    shown = (NOT_MEASURED if value is None else significant(value, 3) for value in errors)
    return (layer.name, " x ".join(map(str, layer.shape)), kept_of(layer), *shown, "; ".join(layer.notes))
