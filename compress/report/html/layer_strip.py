"""The layers of a model as a strip: kinds of layers down, blocks across, one cell for each layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from compress.report.digits import significant
from compress.report.schema import LayerPart, StepPart

COLOURS = 6
FAINTEST = 0.35
"""Opacity of the layer with the least error; the one with the largest has 1."""
NUMBERED = re.compile(r"(.*?)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Cell:
    """One layer, or the experts of a block that share a kind.

    Attributes:
        colour: 1 to COLOURS for a scheme; 0 for what was left alone.
        letter: the scheme's letter in the legend; empty for the most frequent one.
        strength: opacity, FAINTEST to 1, by the relative output error.
        title: name, scheme, error.
    """

    colour: int
    letter: str
    strength: float
    title: str


@dataclass(frozen=True)
class Key:
    """A line of the legend."""

    colour: int
    letter: str
    label: str
    count: int


@dataclass(frozen=True)
class Grid:
    """All layers below one prefix; a row is a kind and its cells, None where a block has no such layer."""

    prefix: str
    blocks: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


@dataclass(frozen=True)
class Strip:
    """The layers of one step.

    Attributes:
        title: the step and what it did, in words.
        loose: layers outside the blocks, with their names.
        errors: the least and the largest error, as text.
    """

    title: str
    grids: tuple[Grid, ...]
    loose: tuple[tuple[str, Cell], ...]
    legend: tuple[Key, ...]
    errors: tuple[str, str] | None


@dataclass(frozen=True)
class Scale:
    """How schemes and errors become colours, letters and strengths."""

    schemes: Mapping[str, int]
    low: float
    high: float

    def cell(self, layers: Sequence[LayerPart]) -> Cell:
        """The cell of layers that share a place; the worst of them speaks for all."""
        worst = max(layers, key=lambda layer: (layer.skipped is None, layer.error_after or 0.0))
        more = f"{len(layers)} layers, the worst: " if len(layers) > 1 else ""
        if worst.skipped is not None:
            return Cell(0, "", 1.0, f"{more}{worst.name}: unquantized, {worst.skipped}")
        index = self.schemes[scheme_of(worst)]
        error = "not known" if worst.error_after is None else significant(worst.error_after, 3)
        title = f"{more}{worst.name}: {scheme_of(worst)}, error {error}"
        return Cell(1 + index % COLOURS, letter_of(index), self.strength(worst.error_after), title)

    def strength(self, error: float | None) -> float:
        if error is None or self.high <= self.low:
            return 0.65
        return round(FAINTEST + (1 - FAINTEST) * (error - self.low) / (self.high - self.low), 3)


def strips(steps: Sequence[StepPart]) -> tuple[Strip, ...]:
    """One strip for each step that changed layers."""
    return tuple(strip(step) for step in steps if step.layers)


def strip(step: StepPart) -> Strip:
    done = [layer for layer in step.layers if layer.skipped is None]
    counts = Counter(scheme_of(layer) for layer in done)
    errors = [layer.error_after for layer in done if layer.error_after is not None]
    scheme_names = [name for name, _ in counts.most_common()]
    scale = Scale({name: i for i, name in enumerate(scheme_names)}, min(errors, default=0.0), max(errors, default=0.0))
    placed = [(NUMBERED.fullmatch(layer.name), layer) for layer in step.layers]
    prefixes = dict.fromkeys(found[1] for found, _ in placed if found)
    keys = [scale_key(scale, name, counts[name]) for name in scheme_names]
    if len(done) < len(step.layers):
        keys.append(Key(0, "", "unquantized", len(step.layers) - len(done)))
    return Strip(
        title=totals_line(step),
        grids=tuple(grid(prefix, placed, scale) for prefix in prefixes),
        loose=tuple((layer.name, scale.cell([layer])) for found, layer in placed if not found),
        legend=tuple(keys),
        errors=(significant(min(errors), 3), significant(max(errors), 3)) if errors else None,
    )


def totals_line(step: StepPart) -> str:
    """`quantize: 210 layers done, 31 left alone, 16,384 calibration tokens`."""
    totals = step.totals
    line = f"{step.kind}: {totals.layers_quantized:,} layers done, {totals.layers_skipped:,} left alone"
    tokens = totals.calibration_tokens
    return line if tokens is None else f"{line}, {tokens:,} calibration tokens"


def scale_key(scale: Scale, name: str, count: int) -> Key:
    index = scale.schemes[name]
    return Key(1 + index % COLOURS, letter_of(index), name, count)


def grid(prefix: str, placed: Sequence[tuple[re.Match[str] | None, LayerPart]], scale: Scale) -> Grid:
    """Kinds in the order of the model; the experts of a block share a cell (`mlp.experts.*.up_proj`)."""
    places: dict[str, dict[int, list[LayerPart]]] = {}
    for found, layer in placed:
        if found and found[1] == prefix:
            kind = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", found[3])
            places.setdefault(kind, {}).setdefault(int(found[2]), []).append(layer)
    blocks = tuple(sorted({block for row in places.values() for block in row}))
    rows = tuple(
        (kind, tuple(scale.cell(row[block]) if block in row else None for block in blocks))
        for kind, row in places.items()
    )
    return Grid(prefix, blocks, rows)


def letter_of(index: int) -> str:
    """What tells schemes apart without colour; nothing for the most frequent one."""
    return "" if index == 0 else ascii_uppercase[(index - 1) % len(ascii_uppercase)]


def scheme_of(layer: LayerPart) -> str:
    return layer.scheme or layer.target or "changed"
