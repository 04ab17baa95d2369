"""What a step took out of a model as a strip: projections down, layers of the original across."""

from __future__ import annotations

from collections import Counter

from compress.report.digits import significant
from compress.report.html.layer_strip import COLOURS, NUMBERED, Cell, Grid, Key, Scale, Strip, letter_of
from compress.report.prune_views import kept_of, prune_steps, pruned_layers, removed_layers, title
from compress.report.schema import LayerPart, Report, StepPart


def prune_strips(report: Report) -> tuple[Strip, ...]:
    """One for each step that pruned."""
    return tuple(prune_strip(step) for step in prune_steps(report))


def prune_strip(step: StepPart) -> Strip:
    """Strength is the error that is left on held-out tokens; layers that were removed are hatched in every row."""
    layers = pruned_layers(step)
    sizes = Counter(map(kept_of, layers))
    errors = [error for layer in layers if (error := error_of(layer)) is not None]
    names = [name for name, _ in sizes.most_common()]
    scale = Scale({name: i for i, name in enumerate(names)}, min(errors, default=0.0), max(errors, default=0.0))
    gone = removed_layers(step)
    keys = [Key(1 + i % COLOURS, letter_of(i), name, sizes[name]) for i, name in enumerate(names)]
    if gone:
        keys.append(Key(0, "", "removed", len(gone)))
    return Strip(
        title=title(step),
        grids=grids(layers, gone, scale),
        loose=(),
        legend=tuple(keys),
        errors=(significant(min(errors), 3), significant(max(errors), 3)) if errors else None,
    )


def grids(layers: tuple[LayerPart, ...], gone: tuple[int, ...], scale: Scale) -> tuple[Grid, ...]:
    """One for each prefix; a removed layer takes a column."""
    places: dict[str, dict[str, dict[int, Cell]]] = {}
    for layer in layers:
        found = NUMBERED.fullmatch(layer.name)
        if found:
            row = places.setdefault(found[1], {}).setdefault(found[3], {})
            row[int(found[2])] = cell(layer, scale)
    made = []
    for prefix, rows in places.items():
        blocks = tuple(sorted({block for row in rows.values() for block in row}.union(gone)))
        removed = {block: Cell(0, "", 1.0, f"{prefix}.{block}: removed") for block in gone}
        cells = tuple((kind, tuple((row | removed).get(block) for block in blocks)) for kind, row in rows.items())
        made.append(Grid(prefix, blocks, cells))
    return tuple(made)


def cell(layer: LayerPart, scale: Scale) -> Cell:
    found, index = layer.pruning, scale.schemes[kept_of(layer)]
    masked, error = (None, None) if found is None else (found.error_masked, found.error_measured)
    known = ", ".join(
        f"{name} {significant(value, 3)}" for name, value in (("masked", masked), ("fitted", error)) if value
    )
    words = f"{layer.name}: {kept_of(layer)}" + (f", error {known}" if known else "")
    return Cell(1 + index % COLOURS, letter_of(index), scale.strength(error), words)


def error_of(layer: LayerPart) -> float | None:
    return None if layer.pruning is None else layer.pruning.error_measured
