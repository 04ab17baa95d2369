"""The pruning walk over a folder, and what its outcome is put into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from compress.journal import Resumed
from compress.model.anatomy import Anatomy, anatomy
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.model.kept import kept_of
from compress.model.prunable import shape_of, unit_axes
from compress.model.shapes import Kept
from compress.progress import Silent
from compress.prune.gradients import Gradients
from compress.prune.settings import PruneSettings
from compress.prune.walk import prune_blocks
from compress.records import LayerRecord


def windows(count: int = 10, length: int = 48) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (length,), generator=generator) for _ in range(count)]


@dataclass
class Walked:
    """Everything that a walk hands out."""

    checkpoint: Checkpoint
    anatomy: Anatomy
    parts: list[str] = field(default_factory=list)
    records: list[LayerRecord] = field(default_factory=list)
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    by_part: list[tuple[Sequence[LayerRecord], Mapping[str, torch.Tensor], dict[str, torch.Tensor] | None]] = field(
        default_factory=list
    )

    @property
    def kept(self) -> tuple[Kept, ...]:
        return kept_of(self.records, self.anatomy.blocks, shape_of(self.checkpoint, self.anatomy))

    def pruning(self, name: str) -> list[Any]:
        """One fact of every projection, in order."""
        return [record.pruning[name] for record in self.records if record.pruning is not None]

    def resumed(self, parts: int) -> Resumed:
        """What a run that was killed after so many parts left."""
        done = self.by_part[:parts]
        records = tuple(record for records, _, _ in done for record in records)
        return Resumed(tuple(self.parts[:parts]), records, {}.__getitem__, done[-1][2])

    def scattered(self) -> dict[str, torch.Tensor]:
        """The replaced tensors at full size, zeros where something was removed."""
        full = dict[str, torch.Tensor]()
        axes = {name: cut for kept in self.kept for name, cut in unit_axes(self.checkpoint, self.anatomy, kept).items()}
        for name, tensor in self.replaced.items():
            full[name] = tensor
            for axis, indices in axes.get(name, ()):
                whole = torch.zeros_like(self.checkpoint.read(name))
                full[name] = whole.index_copy(axis, torch.tensor(indices), tensor)
        return full


def walk(
    folder: Path,
    ids: Sequence[torch.Tensor] = (),
    *,
    keep: Mapping[str, int] | None = None,
    kept_layers: Sequence[int] | None = None,
    gradients: Gradients | None = None,
    resumed: Resumed | None = None,
    **more: Any,
) -> Walked:
    """`prune_blocks` in float32; `keep` are fields of the new Shape, `more` are fields of PruneSettings."""
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    before = shape_of(checkpoint, parts)
    layers = tuple(range(before.layers)) if kept_layers is None else tuple(kept_layers)
    found = Walked(checkpoint, parts)

    def save(part: str, _weights: object, records: Any, replaced: Any, state: Any) -> None:
        found.parts.append(part)
        found.replaced.update(replaced)
        state = None if state is None else {name: state[name].clone() for name in state}
        found.by_part.append((records, replaced, state))

    fields = {"importance": "obs", "compensate": True, "compute_dtype": torch.float32, "device": "cpu"} | more
    found.records = prune_blocks(
        checkpoint,
        parts,
        before=before,
        after=replace(before, **{"layers": len(layers)} | dict(keep or {})),
        kept_layers=layers,
        settings=PruneSettings(**fields),
        windows=ids,
        gradients=gradients,
        save=save,
        progress=Silent(),
        resumed=resumed,
    )
    return found
