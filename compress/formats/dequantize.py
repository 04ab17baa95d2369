"""Writes the dense model that a quantized folder stands for, one layer in memory at a time.

    gptq                 w(o, i) = scales[g_idx[i], o] * (code(i, o) - zero(g_idx[i], o)), see `gptq_read.py`; a column
                         may belong to any group
    compressed-tensors   w(o, i) = (code(o, i) - zero(o, g)) * scale(o, g) with g the column's group, or the only one;
                         scales may also be for the whole tensor or for blocks of rows and columns

Products are computed in float32 and rounded once, to the dtype of the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from compress.durable import space_for, write_bytes
from compress.errors import UsageError
from compress.formats import gptq_read
from compress.formats.pack import int32_to_signed, int32_to_zeros
from compress.formats.quantized_source import SHARD_BYTES, Packed, dense_headers, packed_layers
from compress.formats.stored import Shard, StoredTensor, shard_layout
from compress.formats.write import write_shard
from compress.model.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint, open_checkpoint
from compress.model.sidefiles import side_files
from compress.progress import Advance, Progress

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_dense(
    checkpoint: Checkpoint, folder: Path, *, trust_remote_code: bool = False, progress: Progress
) -> Checkpoint:
    """Writes the dense model of a quantized one into `folder`, which must not be there, with all side files.

    Returns:
        the dense checkpoint, as `dense_headers` foretold it, which knows what it comes from.

    Raises:
        UsageError: the tensors contradict the configuration or one another.
        MissingResourceError: the disk is full.
    """
    planned, layers = dense_headers(checkpoint), {layer.weight.name: layer for layer in packed_layers(checkpoint)}
    tensors = [StoredTensor(info.name, info.dtype, info.shape) for info in planned.tensors.values()]
    shards = shard_layout(tensors, SHARD_BYTES)
    folder.mkdir()
    with progress.phase("Dequantizing the model", sum(shard.data_bytes for shard in shards)) as advance:
        for shard in shards:
            write_shard(folder, shard, _tensors(checkpoint, layers, shard, advance))
    if len(shards) > 1:
        write_bytes(folder / INDEX_FILE, json.dumps(_index(shards)).encode())
    write_bytes(folder / CONFIG_FILE, (json.dumps(planned.config, indent=2) + "\n").encode())
    for relative in side_files(checkpoint.folder, trust_remote_code=trust_remote_code):
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        with space_for(target, (checkpoint.folder / relative).stat().st_size):
            shutil.copyfile(checkpoint.folder / relative, target)
    dense = open_checkpoint(folder, source=checkpoint.source, revision=checkpoint.revision)
    return replace(dense, quantized=checkpoint)


def _tensors(
    checkpoint: Checkpoint, layers: Mapping[str, Packed], shard: Shard, advance: Advance
) -> Iterator[tuple[str, torch.Tensor]]:
    for stored in shard.tensors:
        layer = layers.get(stored.name)
        tensor = checkpoint.read(stored.name) if layer is None else dense_weight(checkpoint, layer)
        yield stored.name, tensor
        advance(stored.nbytes)


def _index(shards: Sequence[Shard]) -> dict[str, object]:
    return {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": {tensor.name: shard.file for shard in shards for tensor in shard.tensors},
    }


def dense_weight(checkpoint: Checkpoint, layer: Packed) -> torch.Tensor:
    """The weight of one layer in the dtype and orientation of the dense model.

    Raises:
        UsageError: its tensors contradict the configuration or one another.
    """
    read = checkpoint.read_many(layer.parts.values())
    tensors = {part: read[full] for part, full in layer.parts.items()}
    try:
        weight = _gptq(layer, tensors) if layer.method == "gptq" else _compressed(layer, tensors)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise UsageError(
            f"{checkpoint.source}: {layer.name} cannot be dequantized: {error}.",
            hint="Its files and its configuration do not belong together: fetch the model again.",
        ) from error
    weight = weight.to(_DTYPES[layer.dtype])
    return weight.T.contiguous() if layer.transposed else weight


def _gptq(layer: Packed, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """float32 [out, in]."""
    (out, width), bits = layer.shape, layer.settings["bits"]
    scales = tensors["scales"].float()  # [groups, out]
    codes = gptq_read.fields(gptq_read.words(tensors["qweight"]).T, width, bits)  # [out, in]
    zeros = gptq_read.zero_points(tensors["qzeros"], out, bits, layer.settings["version"])  # [groups, out]
    if zeros.shape != tuple(scales.shape):
        raise ValueError(f"qzeros are for {list(zeros.shape)}, scales for {list(scales.shape)}")
    group = tensors["g_idx"].long() if "g_idx" in tensors else _in_order(width, len(scales))
    _check_groups(group, len(scales))
    counted = torch.from_numpy(codes.astype(np.float32)) - torch.from_numpy(zeros.astype(np.float32)).T[:, group]
    return counted * scales.T[:, group]


def _compressed(layer: Packed, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """float32 [out, in]."""
    bits = layer.settings["num_bits"]
    if "weight_packed" in tensors:
        stated = tuple(tensors["weight_shape"].tolist())
        if stated != layer.shape:
            raise ValueError(f"weight_shape is {list(stated)}, the packed codes are for {list(layer.shape)}")
        codes = int32_to_signed(tensors["weight_packed"], bits, layer.shape)
    else:
        codes = tensors["weight"]
    scale, zeros = tensors["weight_scale"].float(), tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32 and "weight_packed" in tensors:
        zeros = int32_to_zeros(zeros, bits, (layer.shape[0], scale.shape[-1]))
    spread = [one.float() for one in (scale, zeros) if one is not None]
    columns = [_spread(layer, one, tensors.get("weight_g_idx")) for one in spread]
    counted = codes.float() - columns[1] if zeros is not None else codes.float()
    return counted * columns[0]


def _spread(layer: Packed, values: torch.Tensor, g_idx: torch.Tensor | None) -> torch.Tensor:
    """One number for every weight, or for what can be broadcast to it, from one for each group."""
    out, width = layer.shape
    if values.numel() == 1:
        return values.reshape(1, 1)
    if values.dim() == 1:
        values = values.unsqueeze(1)
    if layer.settings.get("strategy") == "block":
        rows, columns = layer.settings["block_structure"]
        return values.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :width]
    if values.shape[0] != out:
        raise ValueError(f"scales or zero points are {list(values.shape)} for {list(layer.shape)} weights")
    groups = values.shape[1]
    group = _in_order(width, groups)
    if g_idx is not None and not bool((g_idx == -1).all()):
        group = g_idx.long()
    _check_groups(group, groups)
    return values[:, group]


def _in_order(width: int, groups: int) -> torch.Tensor:
    """The group of each column where groups follow one another."""
    if width % groups:
        raise ValueError(f"{groups} groups for {width} columns")
    return torch.arange(width) // (width // groups)


def _check_groups(group: torch.Tensor, groups: int) -> None:
    if int(group.min()) < 0 or int(group.max()) >= groups:
        raise ValueError(f"columns belong to groups {int(group.min())} to {int(group.max())} of {groups}")
