"""Which tensors a format stores for the layers of a model: names, shapes and dtypes, without torch.

The plan prints these sizes before anything is computed, the writer follows them, and the proof checks the
folder against them; so they are exact (`stored.py` lays them out in files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.errors import UsageError
from compress.formats import bitsandbytes_layout, gguf_layout
from compress.formats.stored import DTYPE_ORDER, StoredTensor
from compress.scheme import PER_CHANNEL, Scheme

if TYPE_CHECKING:
    from compress.model.anatomy import LinearLayer
    from compress.model.checkpoint import TensorInfo

_CASTS = {"float16": "F16", "bfloat16": "BF16"}
_CASTABLE = frozenset({"F64", "F32", "BF16", "F16"})
_WORD = 32
"""Bits of the int32 that codes are packed into."""


@dataclass(frozen=True)
class Layout:
    """What one format stores for a quantized layer.

    Attributes:
        tensors: (layer, scheme) -> the tensors that stand in the file for its weight.
        refusal: (layer, scheme) -> why the format cannot hold it, or None.
        scale_dtype: dtype of the weight in the source -> dtype of its scales.
    """

    tensors: Callable[[LinearLayer, Scheme], tuple[StoredTensor, ...]]
    refusal: Callable[[LinearLayer, Scheme], str | None]
    scale_dtype: Callable[[str], str]


def scale_dtype(format_name: str, source_dtype: str) -> str:
    """The dtype that scales are stored in, for a weight whose source dtype is `source_dtype`."""
    return LAYOUTS[format_name].scale_dtype(source_dtype)


def refusals(format_name: str, layers: Iterable[LinearLayer], schemes: Mapping[str, Scheme]) -> tuple[str, ...]:
    """Why a format cannot hold these layers, one sentence per layer; empty when it can."""
    found = []
    for layer in layers:
        scheme = schemes.get(layer.name)
        reason = None if scheme is None else LAYOUTS[format_name].refusal(layer, scheme)
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
    if format_name not in LAYOUTS:
        raise UsageError(f"format '{format_name}' is not known.", hint=f"Formats: {', '.join(LAYOUTS)}.")
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
    return LAYOUTS[format_name].tensors(layer, scheme)


def stem_of(layer: LinearLayer) -> str:
    """What the names of a layer's tensors in the file begin with."""
    return layer.tensor.removesuffix(".weight")


def _words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)


def _unknown_dtypes(tensors: Mapping[str, TensorInfo]) -> list[str]:
    return [f"{name}: dtype {info.dtype}" for name, info in tensors.items() if info.dtype not in DTYPE_ORDER]


def _own_or_half(source_dtype: str) -> str:
    """The model's own dtype: stock loaders create scales in the dtype of the weight, and so never round them."""
    return source_dtype if source_dtype in _CASTABLE else "F16"


def _undivided(layer: LinearLayer, scheme: Scheme) -> str | None:
    if scheme.group_size != PER_CHANNEL and layer.width % scheme.group_size:
        return f"group size {scheme.group_size} does not divide its width {layer.width}"
    return None


def _gptq_tensors(layer: LinearLayer, scheme: Scheme) -> tuple[StoredTensor, ...]:
    stem, groups = stem_of(layer), scheme.groups(layer.width)
    return (
        StoredTensor(f"{stem}.qweight", "I32", (_words(layer.width, scheme.bits), layer.out)),
        StoredTensor(f"{stem}.qzeros", "I32", (groups, _words(layer.out, scheme.bits))),
        StoredTensor(f"{stem}.scales", "F16", (groups, layer.out)),
        StoredTensor(f"{stem}.g_idx", "I32", (layer.width,)),
    )


def _gptq_refusal(layer: LinearLayer, scheme: Scheme) -> str | None:
    if scheme.values == "int" and not scheme.symmetric:
        return "version 1 of gptq stores zero points minus 1 and so cannot store 0: use gptq_v2 or a symmetric scheme"
    return _gptq_v2_refusal(layer, scheme)


def _gptq_v2_refusal(layer: LinearLayer, scheme: Scheme) -> str | None:
    if scheme.values != "int" or scheme.activation_bits is not None:
        return f"gptq holds integer weights and has no way to say that inputs are rounded ({scheme.label})"
    return _undivided(layer, scheme)


def _compressed_tensors(layer: LinearLayer, scheme: Scheme) -> tuple[StoredTensor, ...]:
    stem, groups = stem_of(layer), scheme.groups(layer.width)
    scale = StoredTensor(f"{stem}.weight_scale", _own_or_half(layer.dtype), (layer.out, groups))
    if scheme.activation_bits is not None:
        dtype = "F8_E4M3" if scheme.values == "float" else "I8"
        return (StoredTensor(f"{stem}.weight", dtype, (layer.out, layer.width)), scale)
    packed = (
        StoredTensor(f"{stem}.weight_packed", "I32", (layer.out, _words(layer.width, scheme.bits))),
        scale,
        StoredTensor(f"{stem}.weight_shape", "I64", (2,)),
    )
    if scheme.symmetric:
        return packed
    return (*packed, StoredTensor(f"{stem}.weight_zero_point", "I32", (_words(layer.out, scheme.bits), groups)))


def _compressed_tensors_refusal(layer: LinearLayer, scheme: Scheme) -> str | None:
    if layer.transposed:
        return "stock loaders of compressed-tensors know only nn.Linear and would leave this Conv1D at random"
    if scheme.values in ("nf4", "llm_int8"):
        return f"compressed-tensors has no {scheme.label}"
    if scheme.activation_bits is not None and (scheme.bits, scheme.group_size) != (8, PER_CHANNEL):
        return "weights whose inputs are rounded must have 8 bits and one scale per output channel"
    return _undivided(layer, scheme)


def _plain_refusal(_layer: LinearLayer, scheme: Scheme) -> str | None:
    return f"a plain folder cannot hold {scheme.label}"


LAYOUTS: Mapping[str, Layout] = {
    "compressed-tensors": Layout(_compressed_tensors, _compressed_tensors_refusal, _own_or_half),
    "gptq": Layout(_gptq_tensors, _gptq_refusal, lambda _dtype: "F16"),
    "gptq_v2": Layout(_gptq_tensors, _gptq_v2_refusal, lambda _dtype: "F16"),
    "bitsandbytes": Layout(bitsandbytes_layout.tensors, bitsandbytes_layout.refusal, lambda _dtype: "F32"),
    "gguf": Layout(gguf_layout.layer_tensors, gguf_layout.refusal, lambda _dtype: "F16"),
    "safetensors": Layout(lambda _layer, _scheme: (), _plain_refusal, _own_or_half),
}
