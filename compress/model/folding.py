"""What produces the input of each group of linear layers, and whether a factor per channel can be folded into it.

For any s > 0 per input channel, W x = (W s)(x / s). The division costs nothing at run time where what produces x is
linear in each channel on its own, for then it can take it over:

    norm    the weight (and bias) of a norm whose output feeds these layers and nothing else
    rows    the rows of an earlier linear layer: the values' rows reach the attention's output projection through
            sums over tokens, up's rows reach down's input through a product, and relu(y / s) = relu(y) / s

Where a norm's output also feeds the residual stream (post-norm blocks), or another nonlinearity stands in between,
there is no producer. Read from config and headers, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from compress.model.anatomy import Anatomy, LinearLayer
from compress.model.checkpoint import Checkpoint

Kind = Literal["norm", "rows"]


@dataclass(frozen=True)
class Entry:
    """One group of the table.

    Attributes:
        path: path inside a block of the norm or of the linear layer.
        plus_one: the norm multiplies by 1 + weight.
        part: (index, count) where only one of `count` equal parts of the rows is meant (GPT-2's fused q, k and v).
        attention: attention lies in between, where several query heads may share one value head.
        needs: config fields that must have these values; a missing field has the class's default, which is listed.
    """

    kind: Kind
    path: str
    plus_one: bool = False
    part: tuple[int, int] = (0, 1)
    attention: bool = False
    needs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Producer:
    """Where the factors of one group go.

    Attributes:
        weight, bias: names of its tensors in the file.
        module: module name of the norm or linear layer.
        channels: number of its channels: norm weights, or rows that are meant.
        first_row: the first of these rows; 0 for norms.
        head_dim, repeats: `repeats` neighbouring heads of `head_dim` inputs share one head of channels.
    """

    kind: Kind
    module: str
    weight: str
    bias: str | None
    channels: int
    plus_one: bool = False
    first_row: int = 0
    head_dim: int = 1
    repeats: int = 1

    def channel_of(self, i: int) -> int:
        """The channel that input i of the group's layers comes from."""
        return i // (self.head_dim * self.repeats) * self.head_dim + i % self.head_dim


def _gated(before_attention: str, before_mlp: str, *, plus_one: bool) -> dict[str, Entry]:
    return {
        "qkv": Entry("norm", before_attention, plus_one),
        "o": Entry("rows", "self_attn.v_proj", attention=True),
        "gate_up": Entry("norm", before_mlp, plus_one),
        "down": Entry("rows", "mlp.up_proj"),
    }


_LLAMA = _gated("input_layernorm", "post_attention_layernorm", plus_one=False)
_GEMMA = _gated("input_layernorm", "post_attention_layernorm", plus_one=True)
_GEMMA2 = _gated("input_layernorm", "pre_feedforward_layernorm", plus_one=True)
_OLMO2 = {name: _LLAMA[name] for name in ("o", "down")}  # no norm stands before the others
_PHI3 = {name: _LLAMA[name] for name in ("qkv", "gate_up")}  # v and up are rows of the fused layers
_MIXTRAL = {name: _LLAMA[name] for name in ("qkv", "o")}  # the second norm feeds the router too
_PRE_NORM = (("do_layer_norm_before", True),)
_OPT = {
    "qkv": Entry("norm", "self_attn_layer_norm", needs=_PRE_NORM),
    "o": Entry("rows", "self_attn.v_proj", attention=True),
    "fc1": Entry("norm", "final_layer_norm", needs=_PRE_NORM),
    "fc2": Entry("rows", "fc1", needs=(("activation_function", "relu"),)),
}
_GPT2 = {
    "qkv": Entry("norm", "ln_1"),
    "o": Entry("rows", "attn.c_attn", part=(2, 3), attention=True),
    "fc": Entry("norm", "ln_2"),
}
_BERT = {"o": Entry("rows", "attention.self.value", attention=True)}
_DISTILBERT = {"o": Entry("rows", "attention.v_lin", attention=True)}
_MPNET = {"o": Entry("rows", "attention.attn.v", attention=True)}
_MODERNBERT = {
    "qkv": Entry("norm", "attn_norm"),  # block 0 has none
    "o": Entry("rows", "attn.Wqkv", part=(2, 3), attention=True),
    "gate_up": Entry("norm", "mlp_norm"),
    "down": Entry("rows", "mlp.Wi", part=(1, 2)),  # act(first half) * second half
}

FOLDING: dict[str, Mapping[str, Entry]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "olmo2": _OLMO2,
    "phi3": _PHI3,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "opt": _OPT,
    "gpt2": _GPT2,
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": _DISTILBERT,
    "mpnet": _MPNET,
    "modernbert": _MODERNBERT,
}


def producers(checkpoint: Checkpoint, anatomy: Anatomy, quantized: Set[str] | None = None) -> dict[str, Producer]:
    """{fused group ("model.layers.0:qkv"): producer of its inputs}; groups without one are left out.

    Args:
        quantized: names of the layers that will be quantized, if not all: a layer that keeps its weight cannot take
            factors over exactly, so its group is left out.
    """
    kept = set() if quantized is None else {layer.fused for layer in anatomy.layers if layer.name not in quantized}
    table = FOLDING.get(anatomy.model_type, {})
    layers = {layer.name: layer for layer in anatomy.layers}
    found = {}
    for consumer in anatomy.layers:
        entry = table.get(consumer.fused.rpartition(":")[2])
        if entry is None or consumer.fused in found or consumer.fused in kept or not _holds(checkpoint.config, entry):
            continue
        module = f"{anatomy.block_name(consumer.block)}.{entry.path}"
        if entry.kind == "norm":
            producer = _norm(checkpoint, anatomy, consumer, entry, module)
        else:
            producer = _rows(checkpoint.config, consumer, entry, layers[module])
        if producer is not None:
            found[consumer.fused] = producer
    return found


def _holds(config: Mapping[str, Any], entry: Entry) -> bool:
    return all(config.get(field, value) == value for field, value in entry.needs)


def _norm(
    checkpoint: Checkpoint, anatomy: Anatomy, consumer: LinearLayer, entry: Entry, module: str
) -> Producer | None:
    stem = anatomy.file_prefix + module.removeprefix(anatomy.module_prefix)
    info = checkpoint.tensors.get(f"{stem}.weight")
    if info is None or tuple(info.shape) != (consumer.width,):
        return None  # OPT can leave the norm's weight out
    bias = f"{stem}.bias" if f"{stem}.bias" in checkpoint.tensors else None
    return Producer("norm", module, info.name, bias, consumer.width, entry.plus_one)


def _rows(config: Mapping[str, Any], consumer: LinearLayer, entry: Entry, layer: LinearLayer) -> Producer | None:
    index, count = entry.part
    channels = layer.out // count
    if channels * count != layer.out or consumer.width % channels:
        return None
    repeats, head_dim = consumer.width // channels, 1
    if entry.attention:
        names = ("num_attention_heads", "n_head", "n_heads")
        heads = next((config[name] for name in names if name in config), None)
        if not isinstance(heads, int) or heads < 1 or consumer.width % heads or heads % repeats:
            return None
        head_dim = consumer.width // heads
    elif repeats != 1:
        return None
    return Producer("rows", layer.name, layer.tensor, layer.bias, channels, False, index * channels, head_dim, repeats)
