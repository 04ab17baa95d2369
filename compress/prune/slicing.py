"""The tensors of a pruned block as they are stored."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compress.model.anatomy import Anatomy
from compress.model.checkpoint import Checkpoint
from compress.model.prunable import Axes, unit_axes
from compress.model.shapes import Kept


def sliced(tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
    """What is kept of a tensor, in memory of its own."""
    for axis, indices in axes:
        tensor = tensor.index_select(axis, torch.tensor(indices, dtype=torch.int64))
    return tensor.contiguous()


def block_tensors(
    checkpoint: Checkpoint, anatomy: Anatomy, kept: Kept, changed: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Every tensor of a block that differs from the original's: {name in the source: tensor in the source's dtype}.

    Args:
        changed: tensors with other values than the original's, at full size.
    """
    axes = unit_axes(checkpoint, anatomy, kept)
    names = dict.fromkeys([*axes, *changed])
    return {
        name: sliced(changed[name] if name in changed else checkpoint.read(name), axes.get(name, ())) for name in names
    }
