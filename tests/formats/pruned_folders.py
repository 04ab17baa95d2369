"""Pruned folders with units that are drawn at random, and what proves them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compress.formats.proof import ProofJob, stored_sha256
from compress.formats.pruned import full_size, write_pruned
from compress.formats.stored import Shard, StoredTensor, shard_layout
from compress.model.anatomy import Anatomy, anatomy
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.model.prunable import shape_of, unit_axes
from compress.model.pruned import pruned_checkpoint, source_name
from compress.model.shapes import Kept, Shape
from compress.pipeline.proving import answers, named_cases
from compress.progress import Silent
from compress.prune.slicing import sliced


@dataclass
class Cut:
    """A pruned model before it is written: tests change what they want to be wrong.

    Attributes:
        replaced: the cut tensors, by their names in the source.
    """

    source: Checkpoint
    anatomy: Anatomy
    kept: tuple[Kept, ...]
    planned: Checkpoint
    shards: tuple[Shard, ...]
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        return [one.block for one in self.kept]

    def write(self, stage: Path, **changed: Any) -> Path:
        """The folder; `changed` are arguments of `write_pruned`."""
        arguments: dict[str, Any] = {
            "config": self.planned.config,
            "shards": self.shards,
            "kept_layers": self.layers,
            "replaced": self.replaced,
        }
        write_pruned(
            self.source,
            self.anatomy,
            stage,
            **(arguments | changed),
            trust_remote_code=False,
            progress=Silent(),
        )
        return stage

    def job(self, stage: Path, **changed: Any) -> ProofJob:
        """The proof's job; the full-size model answers for `self.replaced`."""
        windows = list(torch.randint(250, (3, 48), generator=torch.Generator().manual_seed(3)))
        model = full_size(self.source, self.anatomy, kept=self.kept, replaced=self.replaced)
        logits = stage.with_name(f"{stage.name}.logits.safetensors")
        save_file(named_cases(windows, answers(model, windows, self.anatomy.kind)), logits)
        names = {name: source_name(self.anatomy, name, self.layers) for name in self.planned.tensors}
        hashes = {name: stored_sha256(tensor) for name, tensor in self.replaced.items()}
        fields: dict[str, Any] = {
            "planned": self.shards,
            "weight_sha256": {},
            "logits": logits,
            "kind": self.anatomy.kind,
            "loader": "stock",
            "source": self.source.folder,
            "replaced_sha256": {name: hashes[before] for name, before in names.items() if before in hashes},
            "config": self.planned.config,
            "names": names,
        }
        return ProofJob(stage, **(fields | changed))


def cut(folder: Path, *, layers: Sequence[int] | None = None, seed: int = 0, **numbers: int) -> Cut:
    """A model with random units of each kind; `numbers` are fields of the new Shape."""
    source = open_checkpoint(folder)
    parts = anatomy(source)
    before = shape_of(source, parts)
    blocks = list(range(before.layers)) if layers is None else list(layers)
    after = Shape(**{**vars(before), **numbers, "layers": len(blocks)})
    chance = random.Random(seed)
    kept = tuple(_drawn(before, after, block, chance) for block in blocks)
    planned = pruned_checkpoint(source, parts, after, blocks)
    tensors = [StoredTensor(info.name, info.dtype, info.shape) for info in planned.tensors.values()]
    found = Cut(source, parts, kept, planned, shard_layout(tensors, 10**9))
    for one in kept:
        found.replaced |= {
            name: sliced(source.read(name), axes) for name, axes in unit_axes(source, parts, one).items()
        }
    return found


def _drawn(before: Shape, after: Shape, block: int, chance: random.Random) -> Kept:
    group, stay = before.heads // before.kv_heads, after.heads // after.kv_heads
    kv_heads = sorted(chance.sample(range(before.kv_heads), after.kv_heads))
    heads = [kv * group + head for kv in kv_heads for head in sorted(chance.sample(range(group), stay))]
    ffn = sorted(chance.sample(range(before.ffn), after.ffn))
    return Kept(block, tuple(ffn), tuple(heads), tuple(kv_heads))
