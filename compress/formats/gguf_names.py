"""Which models llama.cpp runs from a file of ours, what it calls their tensors, and how it wants their values.

Facts of llama.cpp's own conversion, which its graphs rely on:

    llama   rotates neighbouring pairs of a head, transformers its two halves: rows of q and k change places
    gemma3  multiplies by a norm's weight, transformers by 1 + weight: 1 is added
    all     norms and biases are float32, other tensors float16; a tied head is not stored

Source: llama.cpp, convert_hf_to_gguf.py and src/llama-model.cpp; the package `gguf`, tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FAMILIES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
"""Model type -> what llama.cpp calls its architecture."""

ROPE_FACTORS = "rope_freqs.weight"
"""The one tensor of a file that no checkpoint of transformers has: divisors of the rotary frequencies (llama3)."""

_HEAD = "lm_head.weight"
_ROTATED = re.compile(r"\.self_attn\.(q|k)_proj\.(weight|bias)$")


def file_names(model_type: str, depth: int, names: Iterable[str]) -> dict[str, str]:
    """{name in the checkpoint: name in the GGUF file}; a name that llama.cpp does not know is left out.

    Raises:
        MissingResourceError: the package `gguf` is not installed.
    """
    from compress.model.gguf_header import gguf_package

    gguf = gguf_package()
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[FAMILIES[model_type]], depth)
    found = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    return {name: mapped for name, mapped in found.items() if mapped is not None}


def stored(name: str, tied: bool) -> bool:
    """Whether a tensor of the checkpoint is in the file at all."""
    return not (tied and name == _HEAD)


def float_type(shape: tuple[int, ...]) -> str:
    """What an unquantized tensor is stored as."""
    return "F32" if len(shape) < 2 else "F16"


def to_file(model_type: str, config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Values, or codes, or scales, as the file wants them; the dtype stays, but for gemma3's norms (float32).

    Args:
        config: the model's, as transformers reads it.
    """
    heads = _heads(model_type, config, name)
    if heads is not None:
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.float() + 1 if _offset(model_type, name) else tensor


def from_file(model_type: str, config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_file`."""
    heads = _heads(model_type, config, name)
    if heads is not None:
        pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)
    return tensor.float() - 1 if _offset(model_type, name) else tensor


def _heads(model_type: str, config: Any, name: str) -> int | None:
    """The number of heads whose rows change places, or None where none do."""
    rotated = _ROTATED.search(name)
    if FAMILIES[model_type] != "llama" or rotated is None:
        return None
    heads = int(config.num_attention_heads)
    return heads if rotated[1] == "q" else int(config.num_key_value_heads or heads)


def _offset(model_type: str, name: str) -> bool:
    return FAMILIES[model_type] == "gemma3" and name.endswith("norm.weight")
