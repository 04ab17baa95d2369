"""The GGUF file of a model, to the byte, from config, tokenizer and headers: without torch.

Symmetric 4-bit codes with groups of 32 become blocks of Q4_0, 8-bit ones of Q8_0; everything else is float16, norms
and biases float32. A block is a float16 scale d and 32 codes:

    Q4_0   18 bytes   value = d * (nibble - 8); byte j holds codes j (low nibble) and j + 16 (high nibble)
    Q8_0   34 bytes   value = d * int8

Source: ggml, src/ggml-common.h (block_q4_0, block_q8_0).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.errors import UsageError
from compress.formats.gguf_names import FAMILIES, ROPE_FACTORS, file_names, float_type, stored
from compress.formats.stored import StoredTensor
from compress.model.gguf_header import GGUF_FILE, padded
from compress.scheme import Scheme

if TYPE_CHECKING:
    from compress.model.anatomy import Anatomy, LinearLayer
    from compress.model.checkpoint import Checkpoint, TensorInfo

GROUP_SIZE = 32
_BLOCKS = {4: "Q4_0", 8: "Q8_0"}
_HELD = ("F64", "F32", "BF16", "F16")
_NUMBER = re.compile(r"^blk\.(\d+)\.")
_HEADED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_BIASES = {"llama": None, "qwen2": ("q_proj.bias", "k_proj.bias", "v_proj.bias"), "qwen3": (), "gemma3": ()}
"""Biases that llama.cpp adds, by architecture; None: all."""


@dataclass(frozen=True)
class GgufFile:
    """The one weight file of a GGUF folder.

    Attributes:
        tensors: in the order of the file, under its names.
        sources: for each of them the name in the checkpoint; None for what no checkpoint has (`rope_freqs`).
        head: everything before the data, without padding.
        config: the model's, as transformers reads it.
    """

    tensors: tuple[StoredTensor, ...]
    sources: tuple[str | None, ...]
    head: bytes
    config: Any
    file: str = GGUF_FILE

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Size of the file: metadata, and every tensor padded."""
        return padded(len(self.head)) + sum(padded(tensor.nbytes) for tensor in self.tensors)


def layer_tensors(layer: LinearLayer, scheme: Scheme) -> tuple[StoredTensor, ...]:
    """What is stored for one quantized weight, under its name in the checkpoint."""
    return (StoredTensor(layer.tensor, _BLOCKS[scheme.bits], (layer.out, layer.width)),)


def refusal(layer: LinearLayer, scheme: Scheme) -> str | None:
    if scheme.values != "int" or scheme.activation_bits is not None or not scheme.symmetric:
        return f"GGUF holds symmetric integer weights here ({scheme.label})"
    if scheme.group_size != GROUP_SIZE:
        return f"blocks of Q4_0 and Q8_0 have {GROUP_SIZE} values and a scale, and this is {scheme.label}"
    if layer.width % GROUP_SIZE:
        return f"its width {layer.width} is not a multiple of {GROUP_SIZE}"
    return None


def check_supported(model_type: str, config: Mapping[str, Any]) -> None:
    """Raises UsageError unless llama.cpp runs the model from a file that is written here."""
    stated = config.get("architectures")
    architecture = stated[0] if isinstance(stated, list) and stated else None
    if model_type in FAMILIES and architecture in (None, _HEADED[model_type]):
        return
    what = model_type if model_type not in FAMILIES else f"{architecture} (without an output head)"
    raise UsageError(
        f"{what} cannot be written as gguf. Written are the language models of type {', '.join(FAMILIES)}.",
        hint="Choose another --format.",
    )


def gguf_file(checkpoint: Checkpoint, parts: Anatomy, schemes: Mapping[str, Scheme]) -> GgufFile:
    """The file of a checkpoint whose layers have `schemes`.

    Raises:
        UsageError: llama.cpp does not compute what the model does, or its tokenizer has no counterpart.
        MissingResourceError: the package `gguf` or the tokenizer is not there.
    """
    from compress.formats.gguf_metadata import faults, header, model_config, rope_factors
    from compress.formats.gguf_vocab import read_vocabulary
    from compress.model.hub import tokenizer_folder

    model_type = checkpoint.model_type
    check_supported(model_type, checkpoint.config)
    config, family = model_config(checkpoint.folder), FAMILIES[model_type]
    kept = {name: info for name, info in checkpoint.tensors.items() if stored(name, parts.tied)}
    names = _names(model_type, parts, kept)
    _check(checkpoint, [*faults(family, config), *_tensor_faults(family, kept, names)])
    quantized = {layer.tensor: schemes[layer.name] for layer in parts.layers if layer.name in schemes}
    pairs: list[tuple[StoredTensor, str | None]] = [
        (StoredTensor(names[name], _type(info, quantized.get(name)), tuple(info.shape)), name)
        for name, info in kept.items()
    ]
    if factors := rope_factors(family, config):
        pairs.append((StoredTensor(ROPE_FACTORS, "F32", (len(factors),)), None))
    pairs.sort(key=lambda pair: _order(pair[0].name))
    tensors = tuple(tensor for tensor, _ in pairs)
    folder = tokenizer_folder(checkpoint)
    rows = next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")
    vocabulary = read_vocabulary(folder, rows, checkpoint.source)
    head = header(model_type, config, vocabulary, folder, tensors, _file_type(parts.layers, schemes))
    return GgufFile(tensors, tuple(name for _, name in pairs), head, config)


def _names(model_type: str, parts: Anatomy, kept: Mapping[str, TensorInfo]) -> dict[str, str]:
    """{name in the checkpoint: name in the file}; the map of names knows those with the base model's prefix."""
    lacking = "" if parts.file_prefix else f"{parts.architecture.base}."
    full = {name if name.startswith("lm_head.") else lacking + name: name for name in kept}
    return {full[name]: mapped for name, mapped in file_names(model_type, parts.depth, full).items()}


def _tensor_faults(family: str, kept: Mapping[str, TensorInfo], names: Mapping[str, str]) -> list[str]:
    allowed = _BIASES[family]
    found = [f"{name}: llama.cpp has no name for it" for name in kept if name not in names]
    found += [
        f"{name}: llama.cpp adds no such bias"
        for name in kept
        if allowed is not None and name.endswith(".bias") and not name.endswith(allowed)
    ]
    return found + [f"{name}: dtype {info.dtype}" for name, info in kept.items() if info.dtype not in _HELD]


def _check(checkpoint: Checkpoint, found: Sequence[str]) -> None:
    if found:
        more = f"\n  ... and {len(found) - 20} more" if len(found) > 20 else ""
        raise UsageError(
            f"{checkpoint.source} cannot be written as gguf:\n  " + "\n  ".join(found[:20]) + more,
            hint="Choose another --format.",
        )


def _type(info: TensorInfo, scheme: Scheme | None) -> str:
    return float_type(tuple(info.shape)) if scheme is None else _BLOCKS[scheme.bits]


def _order(name: str) -> tuple[int, str]:
    """What stands before the blocks, then block by block."""
    found = _NUMBER.match(name)
    return (int(found[1]) if found else -1), name


def _file_type(layers: Sequence[LinearLayer], schemes: Mapping[str, Scheme]) -> str:
    """The type of most quantized weights, which llama.cpp shows as that of the file."""
    count: Counter[str] = Counter()
    for layer in layers:
        if layer.name in schemes:
            count[_BLOCKS[schemes[layer.name].bits]] += layer.parameters
    return max(sorted(count), key=count.__getitem__) if count else "F16"
