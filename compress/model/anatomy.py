"""Where the linear layers of an architecture are: one table entry per model type. Read from headers, without torch.

An entry says where the list of blocks hangs, which linear layers a block has, and which of them serving engines
fuse into one matrix (q/k/v, gate/up) and therefore must share one scheme. Everything an entry does not name is
left alone, with a reason that the plan and the report print.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compress.errors import UsageError
from compress.model.checkpoint import Checkpoint, TensorInfo

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


HEAD = "lm_head.weight"
TIED = "tied to the input embedding, protected"
WEIGHT_DTYPES = ("F32", "F16", "BF16")
_MASK = re.compile(r"\.attn\.(masked_)?bias$")

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


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer of one block.

    Attributes:
        name: module name in the stock class ("model.layers.0.mlp.up_proj").
        tensor: name of its weight in the file, which may lack the base model's prefix.
        out, width: output rows and input columns of the matrix the layer computes with.
        transposed: the file holds [width, out].
        block: index of its block.
        fused: name of the group whose members must share one scheme ("model.layers.0:qkv").
        bias: name of the bias tensor in the file, or None.
        dtype: dtype of the weight in the file, as safetensors names it ("BF16").
    """

    name: str
    tensor: str
    out: int
    width: int
    transposed: bool
    block: int
    fused: str
    bias: str | None
    dtype: str

    @property
    def parameters(self) -> int:
        return self.out * self.width


@dataclass(frozen=True)
class Anatomy:
    """What a checkpoint is made of.

    Attributes:
        layers: every linear layer that may be quantized, block by block.
        untouched: {tensor name: reason} of every other tensor; a tied head, which has no tensor of its own,
            stands under its module name.
        file_prefix, module_prefix: the base model's prefix in tensor names and in module names ("model." or "").
        tied: the output head shares the input embedding's weight.
    """

    model_type: str
    kind: Kind
    architecture: Architecture
    depth: int
    layers: tuple[LinearLayer, ...]
    untouched: Mapping[str, str]
    file_prefix: str
    module_prefix: str
    tied: bool

    def block_name(self, index: int) -> str:
        """Module name of block `index`."""
        return f"{self.module_prefix}{self.architecture.blocks}.{index}"

    def module_name(self, tensor: str) -> str:
        """Module name of a tensor in the file: the prefix exchanged, the last part dropped."""
        inner = tensor.removeprefix(self.file_prefix) if self.file_prefix else tensor
        prefix = self.module_prefix if inner != tensor or not self.file_prefix else ""
        return (prefix + inner).rpartition(".")[0]


def anatomy(checkpoint: Checkpoint) -> Anatomy:
    """Finds the linear layers of a checkpoint.

    Raises:
        UsageError: the model type is not in the table, or tensors that the table promises are not in the file.
    """
    entry = _entry(checkpoint)
    _check_class(checkpoint, entry)
    file_prefix = _file_prefix(checkpoint, entry)
    module_prefix = _module_prefix(checkpoint.config, entry)
    depth = _depth(checkpoint.config, entry)
    layers, problems = [], []
    for block in range(depth):
        for suffix, fused in entry.linears:
            tensor = f"{file_prefix}{entry.blocks}.{block}.{suffix}.weight"
            info = checkpoint.tensors.get(tensor)
            if info is None:
                problems.append(f"{tensor}: missing")
            elif len(info.shape) != 2:
                problems.append(f"{tensor}: shape {list(info.shape)} instead of two dimensions")
            elif info.dtype not in WEIGHT_DTYPES:
                problems.append(f"{tensor}: {info.dtype}; linear layers are read in {', '.join(WEIGHT_DTYPES)}")
            else:
                name = f"{module_prefix}{entry.blocks}.{block}.{suffix}"
                group = f"{module_prefix}{entry.blocks}.{block}:{fused}"
                layers.append(_layer(checkpoint.tensors, name, info, block, group, entry.transposed))
    if problems:
        raise UsageError(
            f"{checkpoint.source}: config.json says {checkpoint.model_type} with {depth} blocks, but the weights do "
            "not fit it:\n  " + "\n  ".join(problems[:20]) + _more(problems, 20),
            hint="The folder is incomplete, or config.json belongs to another model.",
        )
    tied = _tied(checkpoint)
    return Anatomy(
        model_type=checkpoint.model_type,
        kind=entry.kind,
        architecture=entry,
        depth=depth,
        layers=tuple(layers),
        untouched=_untouched(checkpoint, {layer.tensor for layer in layers}, tied),
        file_prefix=file_prefix,
        module_prefix=module_prefix,
        tied=tied,
    )


def is_weight(info: TensorInfo) -> bool:
    """Whether a tensor is a parameter: not ids, and not the causal masks that old GPT-2 files carry."""
    return info.dtype.startswith(("F", "BF")) and not _MASK.search(info.name)


def _entry(checkpoint: Checkpoint) -> Architecture:
    entry = ARCHITECTURES.get(checkpoint.model_type)
    if entry is None:
        raise UsageError(
            f"{checkpoint.source}: model type '{checkpoint.model_type}' is not known to this version of compress.",
            hint=f"Known model types: {', '.join(sorted(ARCHITECTURES))}.",
        )
    return entry


def _file_prefix(checkpoint: Checkpoint, entry: Architecture) -> str:
    """Files saved from the bare base model (and GPT-2's originals) have no prefix."""
    prefix = f"{entry.base}."
    return prefix if any(name.startswith(prefix + entry.blocks) for name in checkpoint.tensors) else ""


def class_names(config: Mapping[str, Any]) -> list[str]:
    """`architectures` as a list of names; empty where it is missing or of another form."""
    stated = config.get("architectures")
    return [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []


def _module_prefix(config: Mapping[str, Any], entry: Architecture) -> str:
    classes = class_names(config)
    bare = classes[0] == entry.base_class if classes else entry.kind == "encoder"
    return "" if bare else f"{entry.base}."


def _depth(config: Mapping[str, Any], entry: Architecture) -> int:
    depth = config.get(entry.depth, config.get("num_hidden_layers"))
    if not isinstance(depth, int) or depth < 1:
        raise UsageError(f"config.json: {entry.depth} is {depth!r}; it must be the number of blocks, at least 1.")
    return depth


def _layer(
    tensors: Mapping[str, TensorInfo], name: str, info: TensorInfo, block: int, fused: str, transposed: bool
) -> LinearLayer:
    out, width = reversed(info.shape) if transposed else info.shape
    bias = info.name.removesuffix("weight") + "bias"
    return LinearLayer(
        name=name,
        tensor=info.name,
        out=out,
        width=width,
        transposed=transposed,
        block=block,
        fused=fused,
        bias=bias if bias in tensors else None,
        dtype=info.dtype,
    )


def _check_class(checkpoint: Checkpoint, entry: Architecture) -> None:
    """Refuses classes whose outputs this version cannot measure or whose layers it would not find."""
    classes = class_names(checkpoint.config)
    if entry.kind == "encoder":
        supported = not classes or classes[0] == entry.base_class or classes[0].startswith("BertFor")
        wanted = f"{entry.base_class} or a BertFor... class"
    else:
        supported = bool(classes) and classes[0].endswith(("ForCausalLM", "LMHeadModel"))
        wanted = "a class that generates text (...ForCausalLM, GPT2LMHeadModel)"
    if not supported:
        named = classes[0] if classes else "none"
        raise UsageError(
            f"{checkpoint.source}: config.json names the architecture {named}; for {checkpoint.model_type} this "
            f"version of compress handles {wanted}.",
            hint="Save the model from that class, or set `architectures` in config.json.",
        )


def _tied(checkpoint: Checkpoint) -> bool:
    """What config.json says; where it says nothing, whether the file lacks a head of its own."""
    stated = checkpoint.config.get("tie_word_embeddings")
    return HEAD not in checkpoint.tensors if stated is None else bool(stated)


_REASONS = (
    (re.compile(r"\.bias$"), "bias"),
    (re.compile(r"(norm|ln_\d|ln_f|LayerNorm)", re.IGNORECASE), "norm"),
    (re.compile(r"(^|\.)(lm_head|embed_out|cls|score|classifier|qa_outputs)\."), "output head, protected"),
    (re.compile(r"(embed|embeddings|wte|wpe|shared)"), "embedding, protected"),
    (re.compile(r"(^|\.)(router|gate)\.weight$"), "router, protected"),
    (re.compile(r"pooler"), "pooler, outside the blocks"),
)


def _untouched(checkpoint: Checkpoint, quantizable: set[str], tied: bool) -> dict[str, str]:
    reasons = {}
    for name, info in checkpoint.tensors.items():
        if not is_weight(info):
            reasons[name] = "a buffer, no weight"
        elif name not in quantizable:
            found = (reason for pattern, reason in _REASONS if pattern.search(name))
            reasons[name] = next(found, "not a linear layer of a block")
    if tied and ARCHITECTURES[checkpoint.model_type].kind == "decoder":
        reasons[HEAD if HEAD in checkpoint.tensors else "lm_head"] = TIED
    return reasons


def _more(items: list[str], shown: int) -> str:
    return f"\n  ... and {len(items) - shown} more" if len(items) > shown else ""
