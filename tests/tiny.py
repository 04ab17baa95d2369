"""Tiny random models with a byte-level tokenizer, saved as ordinary Hugging Face folders. Seeded, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "the",
    "of",
    "and",
    "a",
    "in",
    "to",
    "is",
    "was",
    "it",
    "for",
    "on",
    "as",
    "with",
    "by",
    "at",
    "from",
    "his",
    "an",
    "were",
    "are",
    "which",
    "this",
    "also",
    "be",
    "has",
    "had",
    "first",
    "one",
    "their",
    "its",
    "new",
    "after",
    "who",
    "they",
    "have",
    "her",
    "she",
    "two",
    "been",
    "other",
    "when",
    "there",
    "all",
    "city",
    "river",
    "king",
    "war",
    "music",
    "water",
    "stone",
    "light",
    "green",
    "north",
    "small",
    "early",
    "later",
    "known",
    "state",
    "world",
    "people",
    "house",
    "field",
    "book",
    "train",
    "ship",
]


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """256 byte tokens; pass bos_token="Ā" or the like to name special ones. No pad, bos or eos by default."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def sentences(count: int = 64, seed: int = 0) -> list[str]:
    """`count` different pseudo-sentences of 12 to 40 words."""
    generator = torch.Generator().manual_seed(seed)

    def pick(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    return [
        " ".join(WORDS[pick(len(WORDS))] for _ in range(12 + pick(29))).capitalize() + f" {seed}-{index}."
        for index in range(count)
    ]


def write_text(path: Path, count: int = 64, seed: int = 0) -> Path:
    """A jsonl file with key `text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in sentences(count, seed)), encoding="utf-8")
    return path


def save(model: Any, folder: Path, *, dtype: torch.dtype | None = None, **special: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if dtype is not None:
        model = model.to(dtype)
        model.config.dtype = dtype
    model.save_pretrained(folder)
    byte_tokenizer(**special).save_pretrained(folder)
    return folder


def _decoder(folder: Path, config: Any, dtype: torch.dtype | None, seed: int) -> Path:
    torch.manual_seed(seed)
    return save(transformers.AutoModelForCausalLM.from_config(config), folder, dtype=dtype)


def _llama_like(**overrides: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.1,
    } | overrides


def tiny_llama(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    return _decoder(folder, transformers.LlamaConfig(**_llama_like(**overrides)), dtype, seed)


def tiny_mistral(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    return _decoder(folder, transformers.MistralConfig(**_llama_like(**overrides)), dtype, seed)


def tiny_qwen2(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    fields = _llama_like(**overrides)
    del fields["head_dim"]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**fields))
    randomize_biases(model)
    return save(model, folder, dtype=dtype)


def tiny_qwen3(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    return _decoder(folder, transformers.Qwen3Config(**_llama_like(**overrides)), dtype, seed)


def tiny_smollm3(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    return _decoder(folder, transformers.SmolLM3Config(**_llama_like(pad_token_id=None) | overrides), dtype, seed)


def tiny_olmo2(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    return _decoder(folder, transformers.Olmo2Config(**_llama_like(pad_token_id=None) | overrides), dtype, seed)


def tiny_phi3(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """q, k and v in one layer, gate and up in another."""
    fields = _llama_like(pad_token_id=None) | overrides
    del fields["head_dim"]
    return _decoder(folder, transformers.Phi3Config(**fields), dtype, seed)


def tiny_gpt_neox(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """Attention and MLP side by side, biases everywhere, q, k and v in one layer."""
    fields = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    } | overrides
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.GPTNeoXConfig(**fields))
    randomize_biases(model)
    return save(model, folder, dtype=dtype)


def tiny_gemma(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    fields = _llama_like(tie_word_embeddings=True) | overrides
    return _decoder(folder, transformers.GemmaConfig(**fields), dtype, seed)


def tiny_gemma3(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    fields = _llama_like(sliding_window=32, tie_word_embeddings=True, query_pre_attn_scalar=8, num_hidden_layers=3)
    fields |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} | overrides
    return _decoder(folder, transformers.Gemma3TextConfig(**fields), dtype, seed)


def tiny_gemma2(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    fields = _llama_like(sliding_window=32, tie_word_embeddings=True, query_pre_attn_scalar=8) | overrides
    return _decoder(folder, transformers.Gemma2Config(**fields), dtype, seed)


def tiny_opt(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """Biases everywhere (random, not zero) and a tied head."""
    fields = {
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 64,
        "init_std": 0.1,
        "dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 1,
    } | overrides
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.OPTConfig(**fields))
    randomize_biases(model)
    return save(model, folder, dtype=dtype)


def tiny_gpt2(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """Conv1D layers ([in, out] in the file) and a tied head."""
    fields = {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 256,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    } | overrides
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**fields))
    randomize_biases(model)
    return save(model, folder, dtype=dtype)


def tiny_bert(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    fields = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
    } | overrides
    torch.manual_seed(seed)
    model = transformers.BertModel(transformers.BertConfig(**fields))
    randomize_biases(model)
    return save(model, folder, dtype=dtype)


def tiny_roberta(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    """130 positions, of which the padding id and the one before it take two."""
    fields = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 130,
        "initializer_range": 0.1,
        "pad_token_id": 1,
    } | overrides
    torch.manual_seed(seed)
    model = transformers.RobertaModel(transformers.RobertaConfig(**fields))
    randomize_biases(model)
    return save(model, folder, dtype=dtype)


def tiny_distilbert(folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0, **overrides: Any) -> Path:
    fields = {
        "dim": 64,
        "hidden_dim": 128,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
    } | overrides
    torch.manual_seed(seed)
    model = transformers.DistilBertModel(transformers.DistilBertConfig(**fields))
    randomize_biases(model)
    return save(model, folder, dtype=dtype)


def randomize_biases(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.1)
