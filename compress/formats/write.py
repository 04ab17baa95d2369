"""Writes a complete model folder: weight files, index, config.json, and the source's side files.

Weight files are assembled one at a time, in the layout that `formats/layout.py` predicts, and written here
rather than by the library: the bytes are the same (a test compares them), but the permissions are the
umask's, a full disk is an ordinary OSError, and nothing is copied on the way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from compress.durable import space_for, write_bytes
from compress.errors import BrokenResultError
from compress.formats import compressed_tensors, gptq, plain
from compress.formats.layout import layer_tensors, stored_tensors
from compress.formats.stored import Shard, shard_layout
from compress.model.anatomy import LinearLayer, anatomy
from compress.model.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint
from compress.model.load import model_class
from compress.model.sidefiles import copy_side_files
from compress.progress import Advance, Progress
from compress.scheme import QuantizedWeight, Scheme

Pack = Callable[[LinearLayer, QuantizedWeight], dict[str, torch.Tensor]]

_PACK: dict[str, Pack] = {"compressed-tensors": compressed_tensors.pack, "gptq": gptq.pack}
_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def write_checkpoint(
    source: Checkpoint,
    stage: Path,
    *,
    format_name: str,
    layers: Sequence[LinearLayer],
    schemes: Mapping[str, Scheme],
    quantized: Callable[[str], QuantizedWeight],
    cast: str | None,
    max_shard_size: int,
    trust_remote_code: bool,
    progress: Progress,
    replaced: Mapping[str, torch.Tensor] | None = None,
) -> tuple[str, ...]:
    """Writes the output folder into `stage`, every file synced to the disk.

    Args:
        layers: every linear layer of the blocks; those that `schemes` does not name keep their weight.
        quantized: gives the quantized weight of a layer by its name. May be called twice, when a layer's
            tensors fall into two files.
        cast: "float16" or "bfloat16" for a plain cast, else None.
        replaced: tensors to write instead of the source's, by their names in the file.

    Returns:
        the names of the written files, relative to `stage`, sorted.

    Raises:
        UsageError: the format cannot hold a layer; nothing was written.
        BrokenResultError: a quantized weight or a replaced tensor is not finite, out of range or of another form
            than planned.
        MissingResourceError: the disk is full.
    """
    planned = stored_tensors(format_name, source.tensors, layers, schemes, cast=cast)
    shards = shard_layout(planned, max_shard_size)
    pieces = _Pieces(source, format_name, layers, schemes, quantized, cast, replaced or {})
    stage.mkdir(parents=True, exist_ok=True)
    written = []
    with progress.phase("write weights", sum(shard.data_bytes for shard in shards)) as advance:
        for shard in shards:
            write_shard(stage, shard, pieces.of(shard, advance))
            written.append(shard.file)
    if len(shards) > 1:
        write_bytes(stage / INDEX_FILE, _dump(_index(shards), sort=True).encode())
        written.append(INDEX_FILE)
    side_files = copy_side_files(source.folder, stage, trust_remote_code=trust_remote_code)
    for name in side_files:
        _sync(stage / name)
    written += side_files
    config = _config(source, format_name, layers, schemes, cast, trust_remote_code=trust_remote_code)
    written += _write_config(stage, config, in_order=list(source.config) == sorted(source.config))
    return tuple(sorted(written))


def write_shard(folder: Path, shard: Shard, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes one weight file; `tensors` must hold what the shard lists, in the listed dtypes and shapes.

    Raises:
        BrokenResultError: a tensor is of another dtype or shape than planned.
        MissingResourceError: the disk is full.
    """
    for stored in shard.tensors:
        tensor = tensors[stored.name]
        expected = _TORCH_DTYPES.get(stored.dtype, tensor.dtype)
        if tensor.dtype != expected or tensor.nbytes != stored.nbytes or tuple(tensor.shape) != stored.shape:
            raise BrokenResultError(
                f"{stored.name}: planned as {stored.dtype} {list(stored.shape)}, but it is "
                f"{tensor.dtype} {list(tensor.shape)}."
            )
    path = folder / shard.file
    with space_for(path, shard.nbytes), path.open("wb") as file:
        file.write(shard.header())
        for stored in shard.tensors:
            file.write(_bytes_of(tensors[stored.name]))
        file.flush()
        os.fsync(file.fileno())


class _Pieces:
    """Assembles the tensors of a weight file from the source and from quantized weights."""

    def __init__(
        self,
        source: Checkpoint,
        format_name: str,
        layers: Sequence[LinearLayer],
        schemes: Mapping[str, Scheme],
        quantized: Callable[[str], QuantizedWeight],
        cast: str | None,
        replaced: Mapping[str, torch.Tensor],
    ) -> None:
        check_replaced(source, {layer.tensor for layer in layers if layer.name in schemes}, replaced)
        self._source, self._quantized, self._cast, self._replaced = source, quantized, cast, replaced
        self._format_name, self._schemes = format_name, schemes
        self._layers = {layer.name: layer for layer in layers if layer.name in schemes}
        self._owner = {
            tensor.name: name
            for name, layer in self._layers.items()
            for tensor in layer_tensors(format_name, layer, schemes[name])
        }

    def of(self, shard: Shard, advance: Advance) -> dict[str, torch.Tensor]:
        """All tensors of one file; advances by the bytes of each as it is ready."""
        wanted = {tensor.name for tensor in shard.tensors}
        copied = wanted - self._owner.keys()
        stored = self._source.read_many(sorted(copied - self._replaced.keys()))
        stored |= {name: self._replaced[name] for name in sorted(copied & self._replaced.keys())}
        tensors = {name: plain.cast_tensor(name, tensor, self._cast) for name, tensor in stored.items()}
        advance(sum(tensor.nbytes for tensor in tensors.values()))
        for name in sorted({self._owner[tensor] for tensor in wanted & self._owner.keys()}):
            packed = self._packed(name)
            here = {key: packed[key] for key in packed.keys() & wanted}
            advance(sum(tensor.nbytes for tensor in here.values()))
            tensors |= here
        return tensors

    def _packed(self, name: str) -> dict[str, torch.Tensor]:
        layer = self._layers[name]
        weight = self._quantized(name)
        check_weight(layer, weight, self._schemes[name])
        return _PACK[self._format_name](layer, weight)


def check_replaced(source: Checkpoint, quantized: Set[str], replaced: Mapping[str, torch.Tensor]) -> None:
    """Raises BrokenResultError unless every replaced tensor stands for one of the source that stays a tensor."""
    faults = []
    for name, tensor in replaced.items():
        info = source.tensors.get(name)
        if info is None or name in quantized:
            faults.append(f"{name}: {'the source has no such tensor' if info is None else 'is quantized'}")
        elif tensor.dtype != _TORCH_DTYPES.get(info.dtype) or tuple(tensor.shape) != tuple(info.shape):
            faults.append(f"{name}: {tensor.dtype} {list(tensor.shape)} instead of {info.dtype} {list(info.shape)}")
        elif not bool(tensor.isfinite().all()):
            faults.append(f"{name}: not finite")
    if faults:
        raise BrokenResultError("replaced tensors cannot be written: " + "; ".join(faults) + ".")


def check_weight(layer: LinearLayer, weight: QuantizedWeight, scheme: Scheme) -> None:
    """Raises BrokenResultError, naming the layer, unless the weight is one that `scheme` allows."""
    faults = _form_faults(layer, weight, scheme)
    if not faults:
        low, high = scheme.code_range
        least, most = int(weight.codes.min()), int(weight.codes.max())
        if least < low or most > high:
            faults.append(f"codes reach from {least} to {most}, allowed are {low} to {high}")
        bad = int((~(weight.scale.isfinite() & (weight.scale > 0))).sum())
        if bad:
            faults.append(f"{bad} of {weight.scale.numel()} scales are not finite and positive")
        elif not bool(weight.dequantize(torch.float32).isfinite().all()):
            faults.append("code times scale overflows float32")
    if faults:
        raise BrokenResultError(f"{layer.name} cannot be written: " + "; ".join(faults) + ".")


def _form_faults(layer: LinearLayer, weight: QuantizedWeight, scheme: Scheme) -> list[str]:
    faults = []
    grid = (layer.out, scheme.groups(layer.width))
    if weight.scheme != scheme or weight.zero_point is not None:
        faults.append(f"it is {weight.scheme}, planned was {scheme}")
    if weight.codes.dtype != torch.int8 or tuple(weight.codes.shape) != (layer.out, layer.width):
        faults.append(f"codes are {weight.codes.dtype} {list(weight.codes.shape)}")
    if tuple(weight.scale.shape) != grid:
        faults.append(f"scales are {list(weight.scale.shape)} instead of {list(grid)}")
    return faults


def _bytes_of(tensor: torch.Tensor) -> bytes | memoryview:
    """The tensor's bytes in C order, not copied where it is contiguous; little-endian, as torch's wheels."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _index(shards: Sequence[Shard]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": {tensor.name: shard.file for shard in shards for tensor in shard.tensors},
    }


def _config(
    source: Checkpoint,
    format_name: str,
    layers: Sequence[LinearLayer],
    schemes: Mapping[str, Scheme],
    cast: str | None,
    *,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """The source's config.json with what this step changes."""
    config = dict(source.config) if cast is None else plain.cast_config(source.config, cast)
    if format_name == "compressed-tensors":
        untouched = _untouched_modules(source, schemes, trust_remote_code=trust_remote_code)
        config["quantization_config"] = compressed_tensors.quantization_config(layers, schemes, untouched)
    elif format_name == "gptq":
        config["quantization_config"] = gptq.quantization_config(layers, schemes)
    return config


def _write_config(stage: Path, config: Mapping[str, Any], *, in_order: bool) -> list[str]:
    """Writes config.json, sorted if the source's was, and gptq's own file, which repeats a part of it."""
    files = [CONFIG_FILE]
    block = config.get("quantization_config") or {}
    if block.get("quant_method") == "gptq":
        write_bytes(stage / gptq.CONFIG_FILE, _dump(block, sort=False).encode())
        files.append(gptq.CONFIG_FILE)
    write_bytes(stage / CONFIG_FILE, _dump(config, sort=in_order).encode())
    return files


def _untouched_modules(source: Checkpoint, schemes: Mapping[str, Scheme], *, trust_remote_code: bool) -> list[str]:
    """Module names of all weights with two dimensions that stay as they are, and of the output heads.

    Heads are named even where they are tied and have no tensor: loaders would otherwise make quantized layers
    of them and expect scales. The class says which ones it ties.
    """
    parts = anatomy(source)
    names = {layer.name for layer in parts.layers if layer.name not in schemes}
    names |= {
        parts.module_name(name)
        for name in parts.untouched
        if name.endswith(".weight") and len(source.tensors[name].shape) == 2
    }
    cls = model_class(source.config, folder=source.folder, trust_remote_code=trust_remote_code)
    tied: Mapping[str, str] = getattr(cls, "_tied_weights_keys", None) or {}
    names |= {name.removesuffix(".weight") for name in tied if name.endswith(".weight")}
    if parts.kind == "decoder":
        names.add("lm_head")
    return sorted(names)


def _dump(value: Mapping[str, Any], *, sort: bool) -> str:
    return json.dumps(value, indent=2, sort_keys=sort) + "\n"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
