"""A pruned model as a folder, and as its full-size original with zeros where units were removed.

The second stands against the first in the proof. What a removed unit adds is zero in both, so the two answer alike if
and only if the right rows and columns were cut, heads stand in the order that the class expects, and config.json says
how they are to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from compress.errors import BrokenResultError
from compress.formats import proof_blocks
from compress.formats.stored import Shard
from compress.formats.write import write_config, write_shards, write_side_files
from compress.model.anatomy import Anatomy
from compress.model.checkpoint import Checkpoint
from compress.model.load import build_model
from compress.model.prunable import Axes, unit_axes
from compress.model.pruned import source_name
from compress.model.shapes import Kept
from compress.progress import Advance, Progress

_LISTED = 10


def write_pruned(
    source: Checkpoint,
    anatomy: Anatomy,
    stage: Path,
    *,
    config: Mapping[str, Any],
    shards: Sequence[Shard],
    kept_layers: Sequence[int],
    replaced: Mapping[str, torch.Tensor],
    trust_remote_code: bool,
    progress: Progress,
) -> tuple[str, ...]:
    """Writes the folder of a pruned model into `stage`, every file synced to the disk, one tensor in memory at a time.

    Args:
        source, anatomy: the model before.
        config, shards: config.json and the weight files, as planned.
        kept_layers: indices of the layers that stay, ascending.
        replaced: tensors in the place of the source's, by their names there.

    Returns:
        the names of the written files, relative to `stage`, sorted.

    Raises:
        BrokenResultError: a tensor is not finite, or of another form than planned.
        MissingResourceError: the disk is full.
    """

    def tensors_of(shard: Shard, advance: Advance) -> Iterator[tuple[str, torch.Tensor]]:
        for stored in shard.tensors:
            name = source_name(anatomy, stored.name, kept_layers)
            tensor = replaced[name] if name in replaced else source.read(name)
            if name in replaced and not bool(tensor.isfinite().all()):
                raise BrokenResultError(f"{name}: what is left of it after pruning is not finite.")
            yield stored.name, tensor
            advance(tensor.nbytes)

    stage.mkdir(parents=True, exist_ok=True)
    written = write_shards(stage, shards, tensors_of, progress)
    written += write_side_files(source.folder, stage, trust_remote_code=trust_remote_code)
    written += write_config(stage, config, in_order=list(source.config) == sorted(source.config))
    return tuple(sorted(written))


def full_size(
    source: Checkpoint,
    anatomy: Anatomy,
    *,
    kept: Sequence[Kept],
    replaced: Mapping[str, torch.Tensor],
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The source's own class, float32, with the weights of the pruned model and zeros in the place of removed units.

    Removed layers are taken out of its list of blocks, and out of what its config says of single layers.

    Raises:
        BrokenResultError: a tensor lacks units that were to stay, or was to be cut and is not there.
    """
    read = _reader(source, anatomy, kept, replaced)
    state = {name: read(name) for name in source.tensors}
    model = build_model(source.folder, state, dtype=torch.float32, device="cpu", trust_remote_code=trust_remote_code)
    _remove_layers(model, anatomy, [one.block for one in kept])
    return model


def full_size_outputs(
    source: Checkpoint,
    anatomy: Anatomy,
    windows: Sequence[torch.Tensor],
    *,
    kept: Sequence[Kept],
    replaced: Mapping[str, torch.Tensor],
) -> list[torch.Tensor]:
    """Last hidden states, float32 [T, d] for each window of ids [T], of `full_size`: one block in memory at a time.

    Raises as `full_size`.
    """
    read = _reader(source, anatomy, kept, replaced)
    return proof_blocks.walk(source, anatomy, windows, read, [one.block for one in kept])


def _reader(
    source: Checkpoint, anatomy: Anatomy, kept: Sequence[Kept], replaced: Mapping[str, torch.Tensor]
) -> Callable[[str], torch.Tensor]:
    """Gives every tensor of the source at full size, as the pruned model has it."""
    axes = {name: cuts for one in kept for name, cuts in unit_axes(source, anatomy, one).items()}
    if lacking := sorted(axes.keys() - set(replaced)):
        raise BrokenResultError(f"these tensors were to lose units and have lost none: {', '.join(lacking[:_LISTED])}.")

    def read(name: str) -> torch.Tensor:
        if name not in replaced:
            return source.read(name)
        return scattered(name, replaced[name], source.tensors[name].shape, axes.get(name, ()))

    return read


def scattered(name: str, part: torch.Tensor, shape: Sequence[int], axes: Axes) -> torch.Tensor:
    """A tensor of `shape` that holds `part` where units stay, and zeros elsewhere.

    Args:
        axes: (axis, indices) of every axis that was cut; none for a tensor that only has other values.

    Raises:
        BrokenResultError: `part` is not of the shape that these indices have.
    """
    lengths = dict(enumerate(shape)) | {axis: len(indices) for axis, indices in axes}
    if tuple(part.shape) != tuple(lengths.values()):
        raise BrokenResultError(f"{name}: {list(part.shape)} are left of it, planned were {list(lengths.values())}.")
    for axis, indices in axes:
        wide = list(part.shape)
        wide[axis] = shape[axis]
        part = torch.zeros(wide, dtype=part.dtype).index_copy_(axis, torch.tensor(indices), part)
    return part


def _remove_layers(model: PreTrainedModel, anatomy: Anatomy, kept: Sequence[int]) -> None:
    """Leaves the `kept` blocks in the model, and of every list with one item per layer what belongs to them."""
    if len(kept) == anatomy.depth:
        return
    path = anatomy.blocks[0].rpartition(".")[0]
    blocks = cast(nn.ModuleList, model.get_submodule(path))
    for number, index in enumerate(kept):
        for module in blocks[index].modules():
            if hasattr(module, "layer_idx"):  # its place in a cache
                cast(Any, module).layer_idx = number
    model.set_submodule(path, nn.ModuleList([blocks[index] for index in kept]))
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        lists = {name: items for name, items in vars(config).items() if isinstance(items, list)}
        for name, items in lists.items():
            if len(items) == anatomy.depth:
                setattr(config, name, [items[index] for index in kept])
        config.num_hidden_layers = len(kept)
