"""What a GGUF file says of a model: sizes, rotary embedding, tokenizer; and which models llama.cpp computes otherwise.

Everything that llama.cpp would ignore is refused here, before the work starts. Source: llama.cpp,
src/llama-model.cpp (which keys it reads) and convert_hf_to_gguf.py (which ones are written).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import UsageError
from compress.formats.gguf_names import FAMILIES
from compress.formats.gguf_vocab import Vocabulary, add_vocabulary
from compress.formats.stored import StoredTensor
from compress.model.gguf_header import gguf_package

_ACTIVATIONS = {"gemma3": ("gelu_pytorch_tanh",)}
_ROPES = {"llama": ("default", "linear", "llama3", "yarn"), "gemma3": ("default", "linear")}
_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"},
}
_LARGEST_GEMMA3 = 62  # blocks of the 27B model, whose scale llama.cpp takes from the width
_VERSION = 2  # of the blocks of codes
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7}


def model_config(folder: Path) -> Any:
    """config.json with the defaults of its class, as transformers reads it.

    Raises:
        UsageError: transformers rejects it.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UsageError(f"{folder / 'config.json'} cannot be read ({type(error).__name__}: {error}).") from error


def faults(family: str, config: Any) -> list[str]:
    """Settings of a model that llama.cpp does not follow, a sentence each."""
    found = list(_rope_faults(family, config))
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    allowed = _ACTIVATIONS.get(family, ("silu", "swish"))
    if activation not in allowed:
        found.append(f"its activation is {activation}; llama.cpp computes {allowed[0]}")
    if family == "gemma3":
        found += _gemma3_faults(config)
    return found


def _rope_faults(family: str, config: Any) -> Iterator[str]:
    for name, rope in _ropes(config).items():
        kind = rope.get("rope_type", "default")
        allowed = _ROPES.get(family, ("default", "linear", "yarn"))
        if name == "sliding_attention":
            allowed = ("default",)
        if kind not in allowed:
            yield f"its rotary embedding is scaled by {kind}; written here are {', '.join(allowed)}"
            continue
        known = _ROPE_KEYS[kind] | {"rope_type", "rope_theta", "type"}
        for key in sorted(key for key, value in rope.items() if key not in known and value not in (None, 1.0)):
            yield f"its rotary embedding has {key} = {rope[key]}, which is not written"
        if kind == "yarn" and (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1) != (32, 1):
            yield "its rotary embedding (yarn) has other betas than 32 and 1"


def _gemma3_faults(config: Any) -> Iterator[str]:
    scale = config.query_pre_attn_scalar
    expected = config.head_dim
    if config.num_hidden_layers == _LARGEST_GEMMA3:
        expected = config.hidden_size // config.num_attention_heads
    if scale != expected:
        yield f"query_pre_attn_scalar is {scale}; llama.cpp takes {expected}"
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, key, None):
            yield f"{key} is {getattr(config, key)}; llama.cpp leaves it out"
    if _period(config.layer_types) is None:
        yield "layers with full attention do not come at regular steps"


def _period(layer_types: Sequence[str]) -> int | None:
    """p, where layers p, 2p, 3p, ... (counted from 1) have full attention and no others."""
    full = [kind == "full_attention" for kind in layer_types]
    steps = range(1, len(full) + 2)
    return next((p for p in steps if full == [(i + 1) % p == 0 for i in range(len(full))]), None)


def _ropes(config: Any) -> dict[str, Mapping[str, Any]]:
    """Rotary settings by kind of layer; under "" where all layers share them."""
    stated = config.rope_parameters or {}
    if any(isinstance(value, Mapping) for value in stated.values()):
        return {name: value for name, value in stated.items() if isinstance(value, Mapping)}
    return {"": stated}


def rope_factors(family: str, config: Any) -> tuple[float, ...] | None:
    """Divisors of the rotary frequencies, one for each pair of a head, for scaling llama3; else None.

    Long waves are stretched by `factor`, short ones not, those between by a mean of both: transformers,
    modeling_rope_utils.py.
    """
    rope = _ropes(config).get("", {})
    if family != "llama" or rope.get("rope_type") != "llama3":
        return None
    factor, old = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    half = _head_dim(config) // 2
    divisors = []
    for pair in range(half):
        wave = 2 * math.pi * float(rope["rope_theta"]) ** (pair / half)
        if wave < old / high:
            divisors.append(1.0)
        elif wave > old / low:
            divisors.append(factor)
        else:
            share = (old / wave - low) / (high - low)
            divisors.append(1 / ((1 - share) / factor + share))
    return tuple(divisors)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def header(
    model_type: str,
    config: Any,
    vocabulary: Vocabulary,
    tokenizer: Path,
    tensors: Sequence[StoredTensor],
    file_type: str,
) -> bytes:
    """Everything before the data of a file: metadata and the list of tensors, without the padding behind it."""
    gguf = gguf_package()
    writer: Any = gguf.GGUFWriter(None, FAMILIES[model_type])
    _add_model(writer, gguf, model_type, config, len(vocabulary.tokens))
    writer.add_file_type(FILE_TYPES[file_type])
    writer.add_quantization_version(_VERSION)
    add_vocabulary(writer, vocabulary, tokenizer)
    import numpy as np

    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.dtype]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
    text = io.BytesIO()
    writer.fout, writer.state = [text], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return text.getvalue()


def _add_model(writer: Any, gguf: Any, model_type: str, config: Any, rows: int) -> None:
    head_dim, heads = _head_dim(config), config.num_attention_heads
    writer.add_vocab_size(rows)
    writer.add_context_length(context(model_type, config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads or heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    ropes = _ropes(config)
    rope = ropes.get("full_attention") or ropes.get("") or ropes["sliding_attention"]
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    _add_scaling(writer, gguf, rope)
    if FAMILIES[model_type] == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(_period(config.layer_types))
        local = ropes.get("sliding_attention") or rope
        writer.add_rope_freq_base_swa(float(local["rope_theta"]))


def _add_scaling(writer: Any, gguf: Any, rope: Mapping[str, Any]) -> None:
    """Linear and yarn; llama3 is a tensor of its own, see `rope_factors`."""
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))


def context(model_type: str, config: Any) -> int:
    """Positions; where llama.cpp lets all layers see everything, no more than a sliding window, so that both agree."""
    positions, window = int(config.max_position_embeddings), getattr(config, "sliding_window", None)
    if FAMILIES[model_type] == "gemma3" or window is None:
        return positions
    sliding = getattr(config, "layer_types", None) or ["sliding_attention"]
    return min(positions, int(window)) if "sliding_attention" in sliding else positions
