"""Tiny random models whose blocks look different from a plain decoder's or BERT's. Seeded, no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import randomize_biases, save

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
_TEXT = _SMALL | {"vocab_size": 256, "max_position_embeddings": 128}
_NO_IDS = {"bos_token_id": None, "eos_token_id": None}


def _saved(make: Any, config: Any, folder: Path, dtype: torch.dtype | None, seed: int) -> Path:
    torch.manual_seed(seed)
    model = make(config)
    randomize_biases(model)
    return save(model, folder, dtype=dtype)


def tiny_xlm_roberta(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    config = transformers.XLMRobertaConfig(**_TEXT | {"max_position_embeddings": 130, "pad_token_id": 1} | overrides)
    return _saved(transformers.XLMRobertaModel, config, folder, dtype, seed)


def tiny_mpnet(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """130 positions, of which the padding id and the one before it take two; layers return tuples."""
    config = transformers.MPNetConfig(**_TEXT | {"max_position_embeddings": 130} | overrides)
    return _saved(transformers.MPNetModel, config, folder, dtype, seed)


def tiny_modernbert(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """A full and a sliding attention, q, k and v in one layer, gate and up in another; block 0 has no first norm."""
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
    config = transformers.ModernBertConfig(**_TEXT | special | {"local_attention": 16, "pad_token_id": 0} | overrides)
    return _saved(transformers.ModernBertModel, config, folder, dtype, seed)


def tiny_vit(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """The file calls its layers otherwise than the class does."""
    config = transformers.ViTConfig(**_SMALL | {"image_size": 32, "patch_size": 8, "num_labels": 4} | overrides)
    return _saved(transformers.ViTForImageClassification, config, folder, dtype, seed)


def tiny_whisper(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """Two lists of blocks, and a head tied to the decoder's embedding."""
    fields = {
        "vocab_size": 256,
        "num_mel_bins": 16,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_source_positions": 32,
        "max_target_positions": 32,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "init_std": 0.1,
    } | overrides
    make = transformers.WhisperForConditionalGeneration
    return _saved(make, transformers.WhisperConfig(**fields), folder, dtype, seed)


def tiny_t5(
    folder: Path, make: Any = None, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any
) -> Path:
    """Two lists of blocks, and three names for one embedding."""
    fields = {
        "vocab_size": 256,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    } | overrides
    return _saved(make or transformers.T5ForConditionalGeneration, transformers.T5Config(**fields), folder, dtype, seed)


def tiny_gptj(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """A decoder that no entry of the table describes."""
    fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 256, "rotary_dim": 8}
    config = transformers.GPTJConfig(**fields | _NO_IDS | {"initializer_range": 0.1} | overrides)
    return _saved(transformers.GPTJForCausalLM, config, folder, dtype, seed)
