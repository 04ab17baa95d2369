"""A model that some tool has quantized already, as the dense model that its weights stand for. Without torch.

Names, shapes and dtypes follow from the headers of the packed tensors and from the configuration; `dequantize.py`
makes the weights. compressed-tensors folders with integer or 8-bit floating-point weights and gptq folders are
understood, whichever tool wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from compress.errors import UsageError
from compress.formats.config_groups import group_of
from compress.formats.stored import StoredTensor, shard_layout
from compress.model.architectures import ARCHITECTURES
from compress.model.checkpoint import Checkpoint, read_json_object
from compress.model.safetensors_header import TensorInfo

WAY_OUT = (
    "Start from the original model; or --dequantize (`dequantize: true` in a recipe) starts from the dequantized "
    "weights."
)
ONLY_ORIGINAL = "Start from the original model."
OLD_CONFIG = "quantize_config.json"
GPTQ_BITS = (2, 3, 4, 8)
SHARD_BYTES = 5 * 10**9
_WORD = 32
_LISTED = 10
_CONFIG_KEYS = ("quantization_config", "compression_config")
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_COMPRESSED_PARTS = (
    *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight"),
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
)
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")
"""Scales of the key-value cache, of which a dense model knows nothing."""


@dataclass(frozen=True)
class Packed:
    """A quantized layer in the file.

    Attributes:
        name: what the names of its tensors begin with.
        parts: {last part: whole name} of its tensors.
        shape: of the weight, (out, in).
        dtype: of the dense weight, as safetensors names it.
        transposed: the dense model holds it as [in, out].
        settings: the `weights` of its config group; for gptq its `bits` and the format's `version`.
    """

    name: str
    method: Literal["gptq", "compressed-tensors"]
    parts: Mapping[str, str]
    shape: tuple[int, int]
    dtype: str
    transposed: bool
    settings: Mapping[str, Any]

    @property
    def weight(self) -> TensorInfo:
        """The dense weight; it is in no file yet."""
        return TensorInfo(f"{self.name}.weight", self.dtype, self.shape[::-1] if self.transposed else self.shape, "")


class _UnknownError(Exception):
    """A layer that cannot be understood; the message says why."""


def quantization(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """What config.json says of the quantization, or the file of its own that AutoGPTQ wrote; None for dense models."""
    for key in _CONFIG_KEYS:
        block = checkpoint.config.get(key)
        if block:
            return block if isinstance(block, Mapping) else {}
    if not any(name.endswith(".qweight") for name in checkpoint.tensors):
        return None
    path = checkpoint.folder / OLD_CONFIG
    return {"quant_method": "gptq", **(read_json_object(path) if path.is_file() else {})}


def method_of(block: Mapping[str, Any]) -> str:
    """`quant_method`; compressed-tensors' older blocks have none, but groups."""
    stated = block.get("quant_method")
    return str(stated) if stated else "compressed-tensors" if "config_groups" in block else "unknown method"


def check_dense(checkpoint: Checkpoint, *, dequantize: bool) -> Checkpoint:
    """The checkpoint to start from: the given one, or the dense one that it stands for.

    Raises:
        UsageError: it is quantized and that was not allowed, or in a way that is not understood; or it is not
            quantized although it should be.
    """
    block = quantization(checkpoint)
    if block is None and not checkpoint.is_quantized:
        if dequantize:
            raise UsageError(f"{checkpoint.source}: the model is not quantized.", hint="Leave `dequantize` out.")
        return checkpoint
    method = "gguf" if block is None else method_of(block)
    known = method in ("compressed-tensors", "gptq")
    if not dequantize:
        raise UsageError(
            f"{checkpoint.source}: the model is quantized already ({method}); whatever is done to it now would add its "
            "error to that of this rounding.",
            hint=WAY_OUT if known else ONLY_ORIGINAL,
        )
    if not known:
        raise UsageError(
            f"{checkpoint.source}: only compressed-tensors and gptq are dequantized; this model is quantized with "
            f"{method}.",
            hint=ONLY_ORIGINAL,
        )
    return dense_headers(checkpoint)


def dense_headers(checkpoint: Checkpoint) -> Checkpoint:
    """The dense model as it will be written: nothing of it can be read yet. Raises UsageError as `packed_layers`."""
    layers = packed_layers(checkpoint)
    gone = {full for layer in layers for full in layer.parts.values()}
    kept = [
        info
        for name, info in checkpoint.tensors.items()
        if name not in gone and not (name.endswith(_CACHE_SCALES) and "kv_cache_scheme" in _block(checkpoint))
    ]
    planned = [StoredTensor(info.name, info.dtype, info.shape) for info in (*kept, *(one.weight for one in layers))]
    shards = shard_layout(planned, SHARD_BYTES)
    tensors = {
        tensor.name: TensorInfo(tensor.name, tensor.dtype, tensor.shape, shard.file)
        for shard in shards
        for tensor in shard.tensors
    }
    config = {key: value for key, value in checkpoint.config.items() if key not in _CONFIG_KEYS}
    return replace(
        checkpoint,
        config=config,
        tensors=dict(sorted(tensors.items())),
        shard_bytes={shard.file: shard.nbytes for shard in shards},
        quantized=checkpoint,
    )


def packed_layers(checkpoint: Checkpoint) -> tuple[Packed, ...]:
    """Every quantized layer.

    Raises:
        UsageError: layers that cannot be understood, each with the reason.
    """
    block = _block(checkpoint)
    gptq = method_of(block) == "gptq"
    mark, layer_of = (".qweight", _gptq_layer) if gptq else (".weight_scale", _compressed_layer)
    found, faults = [], []
    for name in checkpoint.tensors:
        if name.endswith(mark):
            try:
                found.append(layer_of(checkpoint, block, name.removesuffix(mark)))
            except (_UnknownError, KeyError, TypeError, ValueError) as error:
                why = f"no tensor {error}" if isinstance(error, KeyError) else str(error)
                faults.append(f"{name.removesuffix(mark)}: {why}")
    if not found and not faults:
        faults.append(f"no tensor ends with {mark}")
    if faults:
        more = f"\n  ... and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        lines = "\n  ".join(faults[:_LISTED])
        raise UsageError(
            f"{checkpoint.source}: it cannot be dequantized:\n  {lines}{more}",
            hint=ONLY_ORIGINAL,
        )
    return tuple(found)


def _block(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return quantization(checkpoint) or {}


def _parts(checkpoint: Checkpoint, name: str, parts: tuple[str, ...]) -> dict[str, str]:
    return {part: f"{name}.{part}" for part in parts if f"{name}.{part}" in checkpoint.tensors}


def _dtype(checkpoint: Checkpoint, scale: TensorInfo) -> str:
    """The model's own dtype, or that of the scales."""
    text = checkpoint.config.get("text_config")
    for config in (checkpoint.config, text if isinstance(text, Mapping) else {}):
        stated = config.get("dtype", config.get("torch_dtype"))
        if stated in _DTYPES:
            return _DTYPES[stated]
    return scale.dtype


def _gptq_layer(checkpoint: Checkpoint, block: Mapping[str, Any], name: str) -> Packed:
    """Bits and width follow from the shapes, whatever rules for single layers the configuration has.

    Where words are padded, several widths of codes may fit: the one that the configuration states comes first.
    """
    variant = block.get("checkpoint_format", block.get("format", "gptq"))
    if variant not in ("gptq", "gptq_v2") or block.get("is_marlin_format"):
        raise _UnknownError(f"its weights are packed as {variant if variant != 'gptq' else 'marlin'}")
    parts = _parts(checkpoint, name, _GPTQ_PARTS)
    info = {part: checkpoint.tensors[full] for part, full in parts.items()}
    if info["qweight"].dtype != "I32":
        raise _UnknownError(f"its codes are packed into {info['qweight'].dtype}")
    rows, out = info["qweight"].shape
    columns = info["qzeros"].shape[1]
    for bits in sorted(GPTQ_BITS, key=lambda bits: bits != block.get("bits")):
        width = info["g_idx"].shape[0] if "g_idx" in info else rows * _WORD // bits
        if (rows, columns) == (-(-width * bits // _WORD), -(-out * bits // _WORD)):
            break
    else:
        raise _UnknownError(
            f"qweight {list(info['qweight'].shape)} and qzeros {list(info['qzeros'].shape)} fit no width of codes; "
            f"understood are {', '.join(map(str, GPTQ_BITS))} bits"
        )
    architecture = ARCHITECTURES.get(checkpoint.model_type)
    transposed = architecture is not None and architecture.transposed
    settings = {"bits": bits, "version": 2 if variant == "gptq_v2" else 1}
    return Packed(name, "gptq", parts, (out, width), _dtype(checkpoint, info["scales"]), transposed, settings)


def _compressed_layer(checkpoint: Checkpoint, block: Mapping[str, Any], name: str) -> Packed:
    groups = block.get("config_groups") or {}
    group = next(iter(groups.values())) if len(groups) == 1 else group_of(groups, name)
    if group is None:
        raise _UnknownError("no group of the configuration applies to it")
    parts = _parts(checkpoint, name, _COMPRESSED_PARTS)
    info = {part: checkpoint.tensors[full] for part, full in parts.items()}
    weights = group["weights"]
    bits, kind = weights["num_bits"], weights.get("type", "int")
    if f"{name}.weight_global_scale" in checkpoint.tensors:
        raise _UnknownError(f"{bits}-bit numbers with two levels of scales")
    if "weight_packed" in info:
        if kind != "int" or info["weight_packed"].dtype != "I32":
            raise _UnknownError(f"{kind} weights packed into {info['weight_packed'].dtype}")
        shape = _packed_shape(info, weights)
    elif info["weight"].dtype in ("I8", "F8_E4M3"):
        shape = _two(info["weight"].shape)
    else:
        raise _UnknownError(f"{kind} weights in {info['weight'].dtype}")
    dtype = _dtype(checkpoint, info["weight_scale"])
    return Packed(name, "compressed-tensors", parts, shape, dtype, False, dict(weights))


def _packed_shape(info: Mapping[str, TensorInfo], weights: Mapping[str, Any]) -> tuple[int, int]:
    """From headers: `weight_shape` is a tensor. Codes fill whole words, and a row's last word may be padded."""
    out, words = info["weight_packed"].shape
    scales = info["weight_scale"].shape
    width = words * _WORD // weights["num_bits"]
    if weights.get("strategy") == "group" and len(scales) == 2 and "weight_g_idx" not in info:
        width = min(width, scales[1] * weights["group_size"])
    return out, width


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise _UnknownError(f"its weight has {len(shape)} dimensions")
    return shape[0], shape[1]
