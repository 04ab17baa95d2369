"""Which tensors a format stores, and how many bytes its files take: names, shapes and dtypes, without torch.

The plan prints these sizes before anything is computed, the writer follows them, and the proof checks the
folder against them; so they are exact, file headers included. A safetensors file is

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces to a multiple of 8
    data      the tensors, without gaps

and the library's order of tensors, kept here, is: wider dtypes first, then by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.errors import UsageError
from compress.model.safetensors_header import DTYPE_BITS
from compress.scheme import PER_CHANNEL, Scheme

if TYPE_CHECKING:
    from compress.model.anatomy import LinearLayer
    from compress.model.checkpoint import TensorInfo

FORMATS = ("compressed-tensors", "gptq", "safetensors")

# The order in which the safetensors library lays dtypes out.
_DTYPES = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8"),
    *("F6_E3M2", "F6_E2M3", "F4", "BOOL"),
)
_DTYPE_ORDER = {dtype: position for position, dtype in enumerate(_DTYPES)}
_CASTS = {"float16": "F16", "bfloat16": "BF16"}
_CASTABLE = frozenset({"F64", "F32", "BF16", "F16"})
_WORD = 32
"""Bits of the int32 that codes are packed into."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an output file. `dtype` is safetensors' name ("BF16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Shard:
    """One weight file: `tensors` in the order of the file."""

    file: str
    tensors: tuple[StoredTensor, ...]

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Size of the file, header included."""
        return len(self.header()) + self.data_bytes

    def header(self) -> bytes:
        """Everything before the data, as the safetensors library writes it."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in self.tensors:
            end = offset + tensor.nbytes
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (offset, end),
            }
            offset = end
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def scale_dtype(format_name: str, source_dtype: str) -> str:
    """The dtype that scales are stored in, for a weight whose source dtype is `source_dtype`.

    gptq fixes float16. compressed-tensors uses the model's own dtype, so that stock loaders, which create
    scales in the dtype of the weight, never round them.
    """
    if format_name == "gptq":
        return "F16"
    return source_dtype if source_dtype in _CASTABLE else "F16"


def refusals(format_name: str, layers: Iterable[LinearLayer], schemes: Mapping[str, Scheme]) -> tuple[str, ...]:
    """Why a format cannot hold these layers, one sentence per layer; empty when it can."""
    found = []
    for layer in layers:
        scheme = schemes.get(layer.name)
        reason = None if scheme is None else _refusal(format_name, layer, scheme)
        if reason is not None:
            found.append(f"{layer.name}: {reason}")
    return tuple(found)


def stored_tensors(
    format_name: str,
    tensors: Mapping[str, TensorInfo],
    layers: Sequence[LinearLayer],
    schemes: Mapping[str, Scheme],
    *,
    cast: str | None = None,
) -> tuple[StoredTensor, ...]:
    """Every tensor of the output, by name.

    A layer that `schemes` names gives up its weight for the format's tensors; every other tensor (biases too)
    keeps its name, shape and dtype, except that `cast` ("float16" or "bfloat16") rounds the floating ones. A
    tied tensor is listed once, as in the source.

    Raises:
        UsageError: the format cannot hold a layer (all of them are named), or a dtype is unknown.
    """
    if format_name not in FORMATS:
        raise UsageError(f"format '{format_name}' is not known.", hint=f"Formats: {', '.join(FORMATS)}.")
    problems = [*refusals(format_name, layers, schemes), *_unknown_dtypes(tensors)]
    if problems:
        raise UsageError(
            f"format {format_name} cannot hold {len(problems)} tensors:\n  " + "\n  ".join(problems),
            hint="Choose another format (`--format`), or skip these layers.",
        )
    quantized = {layer.tensor: layer for layer in layers if layer.name in schemes}
    stored = []
    for name, info in tensors.items():
        layer = quantized.get(name)
        if layer is None:
            dtype = _CASTS[cast] if cast is not None and info.dtype in _CASTABLE else info.dtype
            stored.append(StoredTensor(name, dtype, tuple(info.shape)))
        else:
            stored.extend(layer_tensors(format_name, layer, schemes[layer.name]))
    return tuple(sorted(stored, key=lambda tensor: tensor.name))


def layer_tensors(format_name: str, layer: LinearLayer, scheme: Scheme) -> tuple[StoredTensor, ...]:
    """The tensors that stand in the file for one quantized weight."""
    stem = stem_of(layer)
    groups = scheme.groups(layer.width)
    scales = scale_dtype(format_name, layer.dtype)
    if format_name == "gptq":
        return (
            StoredTensor(f"{stem}.qweight", "I32", (_words(layer.width, scheme.bits), layer.out)),
            StoredTensor(f"{stem}.qzeros", "I32", (groups, _words(layer.out, scheme.bits))),
            StoredTensor(f"{stem}.scales", scales, (groups, layer.out)),
            StoredTensor(f"{stem}.g_idx", "I32", (layer.width,)),
        )
    scale = StoredTensor(f"{stem}.weight_scale", scales, (layer.out, groups))
    if scheme.activation_bits is not None:
        return (StoredTensor(f"{stem}.weight", "I8", (layer.out, layer.width)), scale)
    return (
        StoredTensor(f"{stem}.weight_packed", "I32", (layer.out, _words(layer.width, scheme.bits))),
        scale,
        StoredTensor(f"{stem}.weight_shape", "I64", (2,)),
    )


def stem_of(layer: LinearLayer) -> str:
    """What the names of a layer's tensors in the file begin with."""
    return layer.tensor.removesuffix(".weight")


def shard_layout(tensors: Iterable[StoredTensor], max_shard_size: int) -> tuple[Shard, ...]:
    """Splits tensors over files as transformers does: greedily in the order of names, by bytes of tensors.

    A tensor larger than `max_shard_size` gets a file of its own.
    """
    parts: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        if parts[-1] and size + tensor.nbytes > max_shard_size:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    return tuple(Shard(_file_name(index, len(parts)), _file_order(part)) for index, part in enumerate(parts))


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _file_order(tensors: Iterable[StoredTensor]) -> tuple[StoredTensor, ...]:
    return tuple(sorted(tensors, key=lambda tensor: (_DTYPE_ORDER[tensor.dtype], tensor.name)))


def _words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)


def _unknown_dtypes(tensors: Mapping[str, TensorInfo]) -> list[str]:
    return [f"{name}: dtype {info.dtype}" for name, info in tensors.items() if info.dtype not in _DTYPE_ORDER]


def _refusal(format_name: str, layer: LinearLayer, scheme: Scheme) -> str | None:
    if scheme.group_size != PER_CHANNEL and layer.width % scheme.group_size:
        return f"group size {scheme.group_size} does not divide its width {layer.width}"
    if format_name == "safetensors":
        return f"a plain folder cannot hold {scheme.label}"
    if not scheme.symmetric:
        # gptq version 1 cannot store the zero point 0. Stock transformers cannot load packed zero points: while it
        # prepares the model, compressed-tensors (0.20.1) gives them the shape they have before packing.
        return f"{format_name} holds zero points that not every loader can read; use a symmetric scheme"
    if format_name == "gptq":
        inputs = f"gptq has no way to say that inputs are rounded ({scheme.label})"
        return None if scheme.activation_bits is None else inputs
    if layer.transposed:
        return "stock loaders of compressed-tensors know only nn.Linear and would leave this Conv1D at random"
    if scheme.activation_bits is not None and (scheme.bits, scheme.group_size) != (8, PER_CHANNEL):
        return "weights whose inputs are rounded must have 8 bits and one scale per output channel"
    return None
