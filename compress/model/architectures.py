"""The table of architectures: where the linear layers of a model type are. Without torch.

An entry says where the list of blocks hangs, which linear layers a block has, and which of them serving engines
fuse into one matrix (q/k/v, gate/up) and therefore must share one scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["decoder", "encoder"]


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        base: attribute of the base model in the classes with a head ("model" in LlamaForCausalLM).
        base_class: class name of the bare base model, whose tensor names lack that attribute.
        blocks: path of the block list inside the base model.
        linears: (path inside a block, fused group) of each linear layer, in the order of the computation.
        depth: the config field that holds the number of blocks.
        transposed: the file holds [in, out] (transformers' Conv1D).
        residuals: (fused group, module path) where a group's output is added, as it is, to the input of that module;
            "" is the block itself.
    """

    kind: Kind
    base: str
    base_class: str
    blocks: str
    linears: tuple[tuple[str, str], ...]
    depth: str = "num_hidden_layers"
    transposed: bool = False
    residuals: tuple[tuple[str, str], ...] = ()


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


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _gated("LlamaModel"),
    "mistral": _gated("MistralModel"),
    "qwen2": _gated("Qwen2Model"),
    "qwen3": _gated("Qwen3Model"),
    "smollm3": _gated("SmolLM3Model"),
    "olmo2": _gated("Olmo2Model", residuals=()),  # its norms come after attention and MLP
    "phi3": Architecture("decoder", "model", "Phi3Model", "layers", _PHI3, residuals=_ADDED),
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
    "distilbert": Architecture(
        "encoder", "distilbert", "DistilBertModel", "transformer.layer", _DISTILBERT, depth="n_layers"
    ),
}
