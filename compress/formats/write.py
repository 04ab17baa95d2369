"""Writes a complete model folder: weight files, index, config.json, and the source's side files.

Weight files are written one tensor at a time, in the layout that `formats/layout.py` predicts, and here rather than by
the library: the bytes are the same (a test compares them), but one layer at a time is in memory, the permissions are
the umask's, and a full disk is an ordinary OSError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compress.durable import space_for, write_bytes
from compress.errors import BrokenResultError
from compress.formats import bitsandbytes, compressed_tensors, gptq, plain
from compress.formats.class_names import by_class_names, untouched_modules
from compress.formats.layout import layer_tensors, stored_tensors
from compress.formats.stored import Shard, StoredTensor, shard_layout
from compress.model.anatomy import LinearLayer, anatomy
from compress.model.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint
from compress.model.sidefiles import copy_side_files
from compress.progress import Advance, Progress
from compress.scheme import QuantizedWeight, Scheme

Pack = Callable[[LinearLayer, QuantizedWeight], dict[str, torch.Tensor]]

_PACK: dict[str, Pack] = {
    "compressed-tensors": compressed_tensors.pack,
    "gptq": partial(gptq.pack, version=1),
    "gptq_v2": partial(gptq.pack, version=2),
    "bitsandbytes": bitsandbytes.pack,
}
_CODES = {"float": torch.float8_e4m3fn}
"""Dtype of codes by the values that they stand for; the others are int8."""
_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
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
    left_out: Set[str] = frozenset(),
) -> tuple[str, ...]:
    """Writes the output folder into `stage`, every file synced to the disk.

    Args:
        layers: every linear layer of the blocks; those that `schemes` does not name keep their weight.
        quantized: gives the quantized weight of a layer by its name. May be called twice, when a layer's
            tensors fall into two files.
        cast: "float16" or "bfloat16" for a plain cast, else None.
        replaced: tensors to write instead of the source's, by their names in the file.
        left_out: tensors of the source that only repeat others: tied embeddings under a second name.

    Returns:
        the names of the written files, relative to `stage`, sorted.

    Raises:
        UsageError: the format cannot hold a layer; nothing was written.
        BrokenResultError: a quantized weight or a replaced tensor is not finite, out of range or of another form
            than planned.
        MissingResourceError: the disk is full.
    """
    if format_name == "gguf":
        stage.mkdir(parents=True, exist_ok=True)
        written = [_write_gguf(source, stage, layers, schemes, quantized, progress)]
    else:
        pieces = _Pieces(source, format_name, layers, schemes, quantized, cast, replaced or {})
        tensors = {name: info for name, info in source.tensors.items() if name not in left_out}
        planned = stored_tensors(format_name, tensors, layers, schemes, cast=cast)
        stage.mkdir(parents=True, exist_ok=True)
        written = write_shards(stage, shard_layout(planned, max_shard_size), pieces.of, progress)
    written += write_side_files(source.folder, stage, trust_remote_code=trust_remote_code)
    config = _config(source, format_name, layers, schemes, cast, trust_remote_code=trust_remote_code)
    written += write_config(stage, config, in_order=list(source.config) == sorted(source.config))
    return tuple(sorted(written))


def write_shards(
    stage: Path,
    shards: Sequence[Shard],
    tensors_of: Callable[[Shard, Advance], Iterable[tuple[str, torch.Tensor]]],
    progress: Progress,
) -> list[str]:
    """Weight files of safetensors, and their index where there are several; returns their names.

    Args:
        tensors_of: gives all tensors of a file by their names, and advances by the bytes of each.
    """
    written = []
    with progress.phase("write weights", sum(shard.data_bytes for shard in shards)) as advance:
        for shard in shards:
            write_shard(stage, shard, tensors_of(shard, advance))
            written.append(shard.file)
    if len(shards) > 1:
        write_bytes(stage / INDEX_FILE, _dump(_index(shards), sort=True).encode())
        written.append(INDEX_FILE)
    return written


def write_side_files(source: Path, stage: Path, *, trust_remote_code: bool) -> list[str]:
    """Copies the side files of a folder, each synced to the disk; returns their names in `stage`."""
    names = copy_side_files(source, stage, trust_remote_code=trust_remote_code)
    for name in names:
        _sync(stage / name)
    return names


def _write_gguf(
    source: Checkpoint,
    stage: Path,
    layers: Sequence[LinearLayer],
    schemes: Mapping[str, Scheme],
    quantized: Callable[[str], QuantizedWeight],
    progress: Progress,
) -> str:
    """The one weight file of llama.cpp."""
    from compress.formats.gguf_layout import gguf_file
    from compress.formats.gguf_write import write_gguf

    chosen = {layer.name: layer for layer in layers if layer.name in schemes}

    def checked(name: str) -> QuantizedWeight:
        weight = quantized(name)
        check_weight(chosen[name], weight, schemes[name])
        return weight

    return write_gguf(
        source,
        stage,
        gguf_file(source, anatomy(source), schemes),
        layer_of={layer.tensor: name for name, layer in chosen.items()},
        quantized=checked,
        progress=progress,
    )


def write_shard(folder: Path, shard: Shard, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes one weight file. Each tensor goes to its place as it comes, whatever the order, and is not kept.

    Args:
        tensors: (name, tensor) of all that the shard lists, in the listed dtypes and shapes.

    Raises:
        BrokenResultError: a tensor is of another dtype or shape than planned, or missing.
        MissingResourceError: the disk is full.
    """
    path, header = folder / shard.file, shard.header()
    places, position = {}, len(header)
    for stored in shard.tensors:
        places[stored.name] = (stored, position)
        position += stored.nbytes
    with space_for(path, shard.nbytes), path.open("wb") as file:
        file.write(header)
        for name, tensor in tensors:
            stored, begin = places.pop(name)
            _check_form(stored, tensor)
            file.seek(begin)
            file.write(_bytes_of(tensor))
        if places:
            raise BrokenResultError(f"{shard.file}: nothing was given for {', '.join(sorted(places))}.")
        file.flush()
        os.fsync(file.fileno())


def _check_form(stored: StoredTensor, tensor: torch.Tensor) -> None:
    expected = _TORCH_DTYPES.get(stored.dtype, tensor.dtype)
    if tensor.dtype != expected or tensor.nbytes != stored.nbytes or tuple(tensor.shape) != stored.shape:
        raise BrokenResultError(
            f"{stored.name}: planned as {stored.dtype} {list(stored.shape)}, but it is "
            f"{tensor.dtype} {list(tensor.shape)}."
        )


class _Pieces:
    """Gives the tensors of a weight file, from the source and from quantized weights, one layer in memory at a time."""

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

    def of(self, shard: Shard, advance: Advance) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of one file by their names; advances by the bytes of each when it has been taken."""
        wanted = {tensor.name for tensor in shard.tensors}
        for name in sorted(wanted - self._owner.keys()):
            stored = self._replaced[name] if name in self._replaced else self._source.read(name)
            tensor = plain.cast_tensor(name, stored, self._cast)
            yield name, tensor
            advance(tensor.nbytes)
        for layer in sorted({self._owner[tensor] for tensor in wanted & self._owner.keys()}):
            packed = self._packed(layer)
            for name in sorted(packed.keys() & wanted):
                yield name, packed[name]
                advance(packed[name].nbytes)

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
        faults += _code_faults(weight, scheme)
        bad = int((~(weight.scale.isfinite() & (weight.scale > 0))).sum())
        if bad:
            faults.append(f"{bad} of {weight.scale.numel()} scales are not finite and positive")
        elif _reaches_far(weight) and not bool(weight.dequantize(torch.float32).isfinite().all()):
            faults.append("code times scale overflows float32")
    if faults:
        raise BrokenResultError(f"{layer.name} cannot be written: " + "; ".join(faults) + ".")


def _reaches_far(weight: QuantizedWeight) -> bool:
    """Whether the largest code times the largest scale is more than float32 holds."""
    largest = {"float": torch.finfo(torch.float8_e4m3fn).max, "nf4": 1.0}.get(weight.scheme.values, 2.0**8)
    return float(weight.scale.max()) * largest > torch.finfo(torch.float32).max


def _code_faults(weight: QuantizedWeight, scheme: Scheme) -> list[str]:
    if scheme.values == "float":
        wrong = int(weight.codes.float().isnan().sum())
        return [f"{wrong} codes are NaN"] if wrong else []
    low, high = scheme.code_range
    faults = []
    for what, numbers in (("codes", weight.codes), ("zero points", weight.zero_point)):
        if numbers is None:
            continue
        least, most = (int(number) for number in numbers.aminmax())
        if least < low or most > high:
            faults.append(f"{what} reach from {least} to {most}, allowed are {low} to {high}")
    return faults


def _form_faults(layer: LinearLayer, weight: QuantizedWeight, scheme: Scheme) -> list[str]:
    faults = []
    grid = (layer.out, scheme.groups(layer.width))
    if weight.scheme != scheme:
        faults.append(f"it is {weight.scheme}, planned was {scheme}")
    faults += _zero_point_faults(weight.zero_point, None if scheme.symmetric else grid)
    dtype = _CODES.get(scheme.values, torch.int8)
    if weight.codes.dtype != dtype or tuple(weight.codes.shape) != (layer.out, layer.width):
        faults.append(f"codes are {weight.codes.dtype} {list(weight.codes.shape)}")
    if tuple(weight.scale.shape) != grid:
        faults.append(f"scales are {list(weight.scale.shape)} instead of {list(grid)}")
    return faults


def _zero_point_faults(zero_point: torch.Tensor | None, shape: tuple[int, int] | None) -> list[str]:
    """Zero points of another form than `shape`; None is none."""
    if zero_point is None:
        return [] if shape is None else ["it has no zero points"]
    if shape is None:
        return ["it has zero points"]
    fits = zero_point.dtype == torch.int8 and tuple(zero_point.shape) == shape
    return [] if fits else [f"zero points are {zero_point.dtype} {list(zero_point.shape)} instead of {list(shape)}"]


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
    named, chosen = by_class_names(source, layers, schemes, trust_remote_code=trust_remote_code)
    if format_name == "compressed-tensors":
        untouched = untouched_modules(source, schemes, trust_remote_code=trust_remote_code)
        renamed = [layer for layer in named if layer.name not in {layer.name for layer in layers}]
        # Patterns match modules for the loaders, and names in the file for the reader.
        block = compressed_tensors.quantization_config([*layers, *renamed], {**schemes, **chosen}, untouched)
        config["quantization_config"] = block
    elif format_name in gptq.FORMATS:
        config["quantization_config"] = gptq.quantization_config(layers, schemes, format_name)
    elif format_name == "bitsandbytes":
        skipped = bitsandbytes.skipped_modules(source, chosen.keys(), trust_remote_code=trust_remote_code)
        config["quantization_config"] = bitsandbytes.quantization_config(named, chosen, skipped)
    return config


def write_config(stage: Path, config: Mapping[str, Any], *, in_order: bool) -> list[str]:
    """Writes config.json, sorted if the source's was, and gptq's own file, which repeats a part of it.

    Returns the names of the files.
    """
    files = [CONFIG_FILE]
    block = config.get("quantization_config") or {}
    if block.get("quant_method") == "gptq":
        write_bytes(stage / gptq.CONFIG_FILE, _dump(block, sort=False).encode())
        files.append(gptq.CONFIG_FILE)
    write_bytes(stage / CONFIG_FILE, _dump(config, sort=in_order).encode())
    return files


def _dump(value: Mapping[str, Any], *, sort: bool) -> str:
    return json.dumps(value, indent=2, sort_keys=sort) + "\n"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
