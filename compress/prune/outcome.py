"""What is to be done in a block, and what came of it: weights, records, units that stay."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from compress.errors import BrokenResultError
from compress.model.anatomy import Anatomy, LinearLayer
from compress.model.checkpoint import Checkpoint
from compress.model.kept import kept_units
from compress.model.prunable import Unit, output_of
from compress.model.shapes import Shape
from compress.prune.fit import Fitted, Projection
from compress.prune.gradients import Gradients
from compress.prune.settings import PruneSettings
from compress.prune.slicing import block_tensors
from compress.prune.units import Units, channels, heads
from compress.records import LayerRecord


@dataclass(frozen=True)
class Task:
    """An output projection, in front of which all windows stop, and the units of its inputs."""

    layer: LinearLayer
    units: Units

    @property
    def group(self) -> str:
        return self.layer.fused


def tasks_of(anatomy: Anatomy, block: int, before: Shape, after: Shape, settings: PruneSettings) -> list[Task]:
    """What is to be done in one block, in the order of the computation."""
    units = {output_of(anatomy, block, "heads").name: heads(before, after)}
    units[output_of(anatomy, block, "ffn").name] = channels(before, after)
    tasks = [Task(layer, units[layer.name]) for layer in anatomy.layers if layer.name in units]
    return [task for task in tasks if settings.compensate or not task.units.all_stay]


@dataclass(frozen=True)
class Walk:
    """What all blocks of one walk share.

    Attributes:
        held: numbers of the windows that decide and are not fitted to.
    """

    checkpoint: Checkpoint
    anatomy: Anatomy
    before: Shape
    after: Shape
    settings: PruneSettings
    gradients: Gradients | None
    held: frozenset[int]

    def half(self, window: int) -> int:
        """0 or 1 by turns for the windows that are fitted to."""
        return (window - sum(number < window for number in self.held)) % 2


@dataclass
class Outcome:
    """Of one block that stays.

    Attributes:
        changed: tensors with new values, at full size, by their name in the source.
        chosen: which units stay, of the kinds some of which go.
    """

    walk: Walk
    index: int
    records: list[LayerRecord] = field(default_factory=list)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    chosen: dict[Unit, tuple[int, ...]] = field(default_factory=dict)

    def read(self, layer: LinearLayer) -> torch.Tensor:
        """float64 [out, in], whatever the file's dtype and orientation.

        Raises:
            BrokenResultError: values are NaN or infinite.
        """
        stored = self.walk.checkpoint.read(layer.tensor).to(self.walk.settings.device).double()
        if not bool(torch.isfinite(stored).all()):
            raise BrokenResultError(f"{layer.name}: the weight has values that are NaN or infinite.")
        return stored.T.contiguous() if layer.transposed else stored

    def projection(self, layer: LinearLayer) -> Projection:
        checkpoint = self.walk.checkpoint
        dtype = checkpoint.read(layer.tensor).dtype
        bias = None if layer.bias is None else checkpoint.read(layer.bias)
        return Projection(
            name=layer.name,
            W=self.read(layer),
            bias=None if bias is None else bias.to(self.walk.settings.device).double(),
            dtype=dtype,
            bias_dtype=dtype if bias is None else bias.dtype,
        )

    def take(self, layer: LinearLayer, units: Units, one: Projection, found: Fitted, tokens: int | None) -> None:
        """Takes an output projection as it is now."""
        kept = found.there.nonzero()[:, 0].tolist()
        if not units.all_stay:
            self.chosen[units.unit] = tuple(kept)
        if found.moved:
            self._store(layer.tensor, found.W.T if layer.transposed else found.W, one.dtype)
            if layer.bias is not None and found.bias is not None:
                self._store(layer.bias, found.bias, one.bias_dtype)
        facts = {"unit": units.unit, "of": units.of, "kept": kept, **found.facts}
        shape = (layer.out, layer.width // units.of * units.keep)
        self.records.append(LayerRecord(layer.name, shape, tokens=tokens, notes=found.notes, pruning=facts))

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is stored of the block where it differs from the source."""
        kept = kept_units(self.index, self.walk.before, self.chosen)
        return block_tensors(self.walk.checkpoint, self.walk.anatomy, kept, self.changed)

    def _store(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
        self.changed[name] = values.to(dtype).cpu().contiguous()
