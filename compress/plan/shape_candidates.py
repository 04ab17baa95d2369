"""Shapes that fit a budget of parameters or bytes, in several proportions; which is best only held-out text can tell.

A model's parameters, and the bytes of its tensors, are linear in each number of units, so that the widest feed-forward
network beside given heads and layers is found by division.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from compress.model.anatomy import Anatomy, LinearLayer, is_weight
from compress.model.checkpoint import Checkpoint, TensorInfo
from compress.model.prunable import Unit, head_size, output_of, producers_of
from compress.model.shapes import Shape
from compress.plan.kept_shape import Legal

MOST = 12
"""Candidates of a search."""
_DEPTHS = (1.0, 0.95, 0.9, 0.85, 0.8)
_LEAST = 0.95
"""Share of the budget that a candidate uses at least, if any does."""
_FFN_HARM, _HEADS_HARM, _LAYERS_HARM = 1.0, 1.5, 6.0
"""How much a removed share of each kind counts, squared, when there are more candidates than `MOST`: heads and layers
are harder to do without."""

Value = Callable[[TensorInfo], int]
"""What a tensor costs: its parameters, or its bytes."""


@dataclass(frozen=True)
class Costs:
    """What a model of some shape costs: all + layers (layer + ffn F + heads H + kv_heads K).

    Attributes:
        all: everything outside the layers, and what single layers have beyond the last one.
        layer: of one layer, what no unit has a part in.
        ffn, heads, kv_heads: of one unit in one layer.
    """

    all: int
    layer: int
    ffn: int
    heads: int
    kv_heads: int

    def of(self, shape: Shape) -> int:
        units = self.ffn * shape.ffn + self.heads * shape.heads + self.kv_heads * shape.kv_heads
        return self.all + shape.layers * (self.layer + units)

    def widest(self, shape: Shape, budget: int) -> int:
        """Channels of the widest feed-forward network with which a model of this shape stays within the budget."""
        return (budget - self.of(replace(shape, ffn=0))) // (shape.layers * self.ffn)


def parameters_of(info: TensorInfo) -> int:
    """Weights in a tensor; none in a buffer."""
    total = 1 if is_weight(info) else 0
    for length in info.shape:
        total *= length
    return total


def bytes_of(info: TensorInfo) -> int:
    """Bytes of a tensor in a file."""
    return info.nbytes


def costs_of(checkpoint: Checkpoint, anatomy: Anatomy, before: Shape, value: Value) -> Costs:
    """What units cost, counted in the last layer."""
    last = anatomy.depth - 1
    stem = f"{anatomy.file_prefix}{anatomy.architecture.blocks}.{last}."
    once = {name: info for name, info in checkpoint.tensors.items() if name not in anatomy.second_names}
    layer = sum(value(info) for name, info in once.items() if name.startswith(stem))
    size = head_size(checkpoint, anatomy)
    units = {"ffn": 0, "heads": 0, "kv_heads": 0}
    pairs: tuple[tuple[Unit, Unit], ...] = (("ffn", "ffn"), ("heads", "heads"))
    for unit, columns in pairs:
        wide = 1 if unit == "ffn" else size
        output = output_of(anatomy, last, unit)
        units[columns] += wide * value(checkpoint.tensors[output.tensor]) // output.width
        for producer, parts in producers_of(anatomy, last, unit):
            for part in parts:
                units[part] += wide * _row(checkpoint, producer, value)
    fixed = layer - units["ffn"] * before.ffn - units["heads"] * before.heads - units["kv_heads"] * before.kv_heads
    outside = sum(value(info) for info in once.values()) - layer * before.layers
    return Costs(all=outside, layer=fixed, **units)


def _row(checkpoint: Checkpoint, layer: LinearLayer, value: Value) -> int:
    """Cost of one output row and its bias."""
    names = [layer.tensor] if layer.bias is None else [layer.tensor, layer.bias]
    return sum(value(checkpoint.tensors[name]) for name in names) // layer.out


def smallest(legal: Legal) -> Shape:
    """The smallest shape that the model can have."""
    heads, kv_heads = min(legal.heads)
    layers = legal.before.layers if "layers" in legal.refusals else legal.kinds
    return Shape(legal.widths[0], heads, kv_heads, layers)


def candidates(legal: Legal, costs: Costs, budget: int) -> tuple[Shape, ...]:
    """At most `MOST` shapes within a budget, the largest first; none where no legal shape is small enough.

    They differ in what is removed of each kind: first with at most a fifth of the layers gone and half of the heads
    left, and only where none of those fits with anything less.
    """
    before = legal.before
    moderate = list(dict.fromkeys(max(round(share * before.layers), legal.kinds) for share in _DEPTHS))
    usual = [pair for pair in legal.heads if 2 * pair[0] >= before.heads and 2 * pair[1] >= before.kv_heads]
    anything = list(range(before.layers, legal.kinds - 1, -1))
    if "layers" in legal.refusals:
        moderate = anything = [before.layers]
    for depths, heads in ((moderate, usual), (anything, legal.heads)):
        found = {*_widest(legal, costs, budget, depths, heads), *_deepest(legal, costs, budget, depths, heads)}
        if found:
            break
    near = {shape for shape in found if costs.of(shape) >= _LEAST * budget} or found
    best = sorted(near, key=lambda shape: (_harm(shape, before), _key(shape)))[:MOST]
    return tuple(sorted(best, key=lambda shape: (-costs.of(shape), _harm(shape, before), _key(shape))))


def _widest(
    legal: Legal, costs: Costs, budget: int, depths: Sequence[int], heads: Sequence[tuple[int, int]]
) -> Iterator[Shape]:
    """With each number of layers and heads the widest feed-forward network that fits."""
    for layers in depths:
        for pair in heads:
            shape = Shape(0, *pair, layers)
            room = costs.widest(shape, budget)
            fitting = [width for width in legal.widths if width <= room]
            if fitting:
                yield replace(shape, ffn=fitting[-1])


def _deepest(
    legal: Legal, costs: Costs, budget: int, depths: Sequence[int], heads: Sequence[tuple[int, int]]
) -> Iterator[Shape]:
    """Whole feed-forward networks in as many layers as fit."""
    for pair in heads:
        shapes = (Shape(legal.before.ffn, *pair, layers) for layers in range(max(depths), min(depths) - 1, -1))
        fitting = next((shape for shape in shapes if costs.of(shape) <= budget), None)
        if fitting is not None:
            yield fitting


def _harm(shape: Shape, before: Shape) -> float:
    removed = (
        (_FFN_HARM, 1 - shape.ffn / before.ffn),
        (_HEADS_HARM, 1 - shape.heads / before.heads),
        (_LAYERS_HARM, 1 - shape.layers / before.layers),
    )
    return sum(harm * share**2 for harm, share in removed)


def _key(shape: Shape) -> tuple[int, int, int, int]:
    return shape.ffn, shape.heads, shape.kv_heads, shape.layers
