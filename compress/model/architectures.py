"""The table of architectures: where the linear layers of a model type are. Without torch.

An entry says where the list of blocks hangs, which linear layers a block has, and which of them serving engines
fuse into one matrix (q/k/v, gate/up) and therefore must share one scheme. Entries without layers, and model types
without an entry, have theirs found by name (`headers.py`); nothing can be calibrated on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compress.model.moe import MIXTRAL, QWEN3_MOE, Experts

Kind = Literal["decoder", "encoder", "other"]
"""What a model's answers are: logits of a text that it goes on with, states of a text that it reads, or neither: it
reads something else, or has an encoder and a decoder. Nothing but proof and sizes is measured of "other" ones."""


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        base: attribute of the base model in the classes with a head ("model" in LlamaForCausalLM).
        base_class: class name of the bare base model, whose tensor names lack that attribute.
        blocks: path of the block list inside the base model.
        linears: (path inside a block, fused group) of each linear layer, in the order of the computation; empty where
            they are found by name.
        depth: the config field that holds the number of blocks.
        transposed: the file holds [in, out] (transformers' Conv1D).
        residuals: (fused group, module path) where a group's output is added, as it is, to the input of that module;
            "" is the block itself.
        refused: {storage: why no stock loader reads it}; a storage is a format, or one of compressed-tensors' own
            (pack-quantized, int-quantized, float-quantized).
        tuples: a block's output is a tuple, which the model takes apart.
        experts: of the blocks that have some; `linears` are then those beside them, see `moe.block_linears`.
    """

    kind: Kind
    base: str
    base_class: str
    blocks: str
    linears: tuple[tuple[str, str], ...]
    depth: str = "num_hidden_layers"
    transposed: bool = False
    residuals: tuple[tuple[str, str], ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    tuples: bool = False
    experts: Experts | None = None


_GATED = (
    ("self_attn.q_proj", "qkv"),
    ("self_attn.k_proj", "qkv"),
    ("self_attn.v_proj", "qkv"),
    ("self_attn.o_proj", "o"),
    ("mlp.gate_proj", "gate_up"),
    ("mlp.up_proj", "gate_up"),
    ("mlp.down_proj", "down"),
)
_OPT = (
    ("self_attn.q_proj", "qkv"),
    ("self_attn.k_proj", "qkv"),
    ("self_attn.v_proj", "qkv"),
    ("self_attn.out_proj", "o"),
    ("fc1", "fc1"),
    ("fc2", "fc2"),
)
_BERT = (
    ("attention.self.query", "qkv"),
    ("attention.self.key", "qkv"),
    ("attention.self.value", "qkv"),
    ("attention.output.dense", "o"),
    ("intermediate.dense", "intermediate"),
    ("output.dense", "output"),
)
_DISTILBERT = (
    ("attention.q_lin", "qkv"),
    ("attention.k_lin", "qkv"),
    ("attention.v_lin", "qkv"),
    ("attention.out_lin", "o"),
    ("ffn.lin1", "intermediate"),
    ("ffn.lin2", "output"),
)
_MPNET = (
    ("attention.attn.q", "qkv"),
    ("attention.attn.k", "qkv"),
    ("attention.attn.v", "qkv"),
    ("attention.attn.o", "o"),
    ("intermediate.dense", "intermediate"),
    ("output.dense", "output"),
)
_MODERNBERT = (("attn.Wqkv", "qkv"), ("attn.Wo", "o"), ("mlp.Wi", "gate_up"), ("mlp.Wo", "down"))
_PHI3 = (
    ("self_attn.qkv_proj", "qkv"),
    ("self_attn.o_proj", "o"),
    ("mlp.gate_up_proj", "gate_up"),
    ("mlp.down_proj", "down"),
)
_GPT_NEOX = (
    ("attention.query_key_value", "qkv"),
    ("attention.dense", "o"),
    ("mlp.dense_h_to_4h", "fc"),
    ("mlp.dense_4h_to_h", "proj"),
)
_GPT2 = (("attn.c_attn", "qkv"), ("attn.c_proj", "o"), ("mlp.c_fc", "fc"), ("mlp.c_proj", "proj"))


_ADDED = (("o", ""), ("down", "post_attention_layernorm"))


def _gated(base_class: str, residuals: tuple[tuple[str, str], ...] = _ADDED) -> Architecture:
    return Architecture("decoder", "model", base_class, "layers", _GATED, residuals=residuals)


def _bert(base: str, base_class: str) -> Architecture:
    residuals = (("o", ""), ("output", "intermediate.dense"))
    return Architecture("encoder", base, base_class, "encoder.layer", _BERT, residuals=residuals)


_STACKED = "transformers holds all experts of a block in one tensor"
_SPARSE_REFUSED = {
    "int-quantized": f"{_STACKED}, and cannot read them from 8-bit integers whose inputs are rounded",
    "float-quantized": f"{_STACKED}, and would not round its inputs, as engines do that serve it",
    "bitsandbytes": f"{_STACKED}, which bitsandbytes leaves in 16 bits (bitsandbytes#1849)",
}


def _sparse(base_class: str, linears: tuple[tuple[str, str], ...], experts: Experts) -> Architecture:
    return Architecture(
        "decoder",
        "model",
        base_class,
        "layers",
        linears,
        residuals=_ADDED,
        refused=_SPARSE_REFUSED,
        experts=experts,
    )


def found_by_name(kind: Kind, refused: Mapping[str, str] | None = None) -> Architecture:
    """An entry without layers."""
    unread = dict.fromkeys(("gptq", "gptq_v2"), _NO_GPTQ if kind == "other" else _UNLISTED)
    return Architecture(kind, "", "", "", (), refused=unread | dict(refused or {}))


_NO_GPTQ = "the loaders of gptq folders know models of text with one list of blocks only"
_UNLISTED = "the loaders of gptq folders know the model types of their own lists only, and none of those is meant here"
_UNPACKABLE = {
    "pack-quantized": "stock transformers fails on it: the class initialises the `weight` that packed layers lack"
}


TIED_BY_DEFAULT = frozenset({"smollm3", "gemma", "gemma2", "gemma3_text", "opt", "gpt2"})
"""Decoders whose output head is the input embedding where config.json does not say `tie_word_embeddings`."""

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _gated("LlamaModel"),
    "mistral": _gated("MistralModel"),
    "qwen2": _gated("Qwen2Model"),
    "qwen3": _gated("Qwen3Model"),
    "smollm3": _gated("SmolLM3Model"),
    "olmo2": _gated("Olmo2Model", residuals=()),  # its norms come after attention and MLP
    "phi3": Architecture("decoder", "model", "Phi3Model", "layers", _PHI3, residuals=_ADDED),
    "mixtral": _sparse("MixtralModel", _GATED[:4], MIXTRAL),
    "qwen3_moe": _sparse("Qwen3MoeModel", _GATED, QWEN3_MOE),
    "gemma": _gated("GemmaModel"),
    "gemma2": _gated("Gemma2Model", residuals=()),
    "gemma3_text": _gated("Gemma3TextModel", residuals=()),
    "opt": Architecture(
        "decoder", "model", "OPTModel", "decoder.layers", _OPT, residuals=(("o", ""), ("fc2", "final_layer_norm"))
    ),
    "gpt2": Architecture(
        "decoder",
        "transformer",
        "GPT2Model",
        "h",
        _GPT2,
        depth="n_layer",
        transposed=True,
        residuals=(("o", ""), ("proj", "ln_2")),
    ),
    "gpt_neox": Architecture("decoder", "gpt_neox", "GPTNeoXModel", "layers", _GPT_NEOX),
    "bert": _bert("bert", "BertModel"),
    "roberta": _bert("roberta", "RobertaModel"),
    "xlm-roberta": _bert("roberta", "XLMRobertaModel"),
    "distilbert": Architecture(
        "encoder", "distilbert", "DistilBertModel", "transformer.layer", _DISTILBERT, depth="n_layers"
    ),
    "mpnet": Architecture("encoder", "mpnet", "MPNetModel", "encoder.layer", _MPNET, tuples=True),
    "modernbert": Architecture("encoder", "model", "ModernBertModel", "layers", _MODERNBERT, refused=_UNPACKABLE),
    "vit": found_by_name("other"),
    "whisper": found_by_name("other"),
    "t5": found_by_name("other", _UNPACKABLE),
}


def of_bare_file(config: Mapping[str, Any], tensors: Iterable[str]) -> Mapping[str, Any]:
    """config.json with the class that the weights were saved from, where that is an encoder without a head.

    sentence-transformers writes the bare model and leaves `architectures` as it was (all-mpnet-base-v2 names
    MPNetForMaskedLM). Files of classes with a head have the base model's prefix.
    """
    entry = ARCHITECTURES.get(str(config.get("model_type")))
    stated = config.get("architectures")
    if entry is None or entry.kind != "encoder" or not stated or stated == [entry.base_class]:
        return config
    parts = {name.partition(".")[0] for name in tensors}
    if entry.blocks.partition(".")[0] not in parts or not parts <= _BARE_PARTS:
        return config
    return {**config, "architectures": [entry.base_class]}


_BARE_PARTS = frozenset({"embeddings", "encoder", "transformer", "layers", "final_norm", "pooler"})
"""What the bare classes of encoders consist of."""
