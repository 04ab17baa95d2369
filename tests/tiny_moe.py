"""Tiny random models with experts, saved as ordinary Hugging Face folders (one matrix for each expert)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
import transformers


def _fields(**overrides: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.1,
        "num_experts_per_tok": 2,
    } | overrides


def tiny_mixtral(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """Four experts in every block."""
    config = transformers.MixtralConfig(**_fields(num_local_experts=4, sliding_window=None) | overrides)
    torch.manual_seed(seed)
    return tiny.save(transformers.AutoModelForCausalLM.from_config(config), folder, dtype=dtype)


def tiny_qwen3_moe(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """Four experts in blocks 0 and 2; block 1 is dense."""
    fields = _fields(num_hidden_layers=3, num_experts=4, moe_intermediate_size=32, mlp_only_layers=[1])
    config = transformers.Qwen3MoeConfig(**fields | {"norm_topk_prob": True} | overrides)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(weight, std=0.1)  # zeros in a new model: every token would go to the same experts
    return tiny.save(model, folder, dtype=dtype)
