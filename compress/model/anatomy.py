"""What a checkpoint is made of, by the table of architectures and the headers of its files. Without torch.

Everything that an entry of the table does not name is left alone, with a reason that the plan and the report print.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.errors import UsageError
from compress.model.architectures import ARCHITECTURES, TIED_BY_DEFAULT, Architecture, Kind, found_by_name
from compress.model.checkpoint import Checkpoint, TensorInfo
from compress.model.dtypes import held_dtype
from compress.model.headers import (
    GENERATES,
    WEIGHT_DTYPES,
    Place,
    found_layers,
    kind_of_class,
    place_of,
    several_inputs,
)
from compress.model.moe import block_linears, check_chosen, check_not_stacked, is_expert_group, served_group

HEAD = "lm_head.weight"
TIED = "tied to the input embedding, protected"
_MASK = re.compile(r"\.attn\.(masked_)?bias$")


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer of one block.

    Attributes:
        name: module name in the stock class ("model.layers.0.mlp.up_proj").
        tensor: name of its weight in the file, which may lack the base model's prefix.
        out, width: output rows and input columns of the matrix the layer computes with.
        transposed: the file holds [width, out].
        block: number of its block, counted over all lists of blocks.
        fused: name of the group whose members must share one scheme ("model.layers.0:qkv").
        bias: name of the bias tensor in the file, or None.
        dtype: in which stock loaders hold the weight, as safetensors names it ("BF16"); see `held_dtype`.
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

    @property
    def place(self) -> Place:
        """The list of blocks, the block's number in it, and the layer's name inside the block."""
        place = place_of(self.name)
        assert place is not None  # only layers inside numbered lists are made
        return place

    @property
    def served(self) -> str:
        """The group whose members need one scheme to be served: `fused`, or for an expert all experts of its block."""
        return served_group(self.fused)


@dataclass(frozen=True)
class Anatomy:
    """What a checkpoint is made of.

    Attributes:
        layers: every linear layer that may be quantized, block by block.
        untouched: {tensor name: reason} of every other tensor; a tied head, which has no tensor of its own,
            stands under its module name.
        file_prefix, module_prefix: the base model's prefix in tensor names and in module names ("model." or "").
        tied: the output head shares the input embedding's weight.
        second_names: tensors that are another tensor's second name: their weight counts once.
        blocks: module name of every block, in the order of `LinearLayer.block`.
    """

    model_type: str
    kind: Kind
    architecture: Architecture
    layers: tuple[LinearLayer, ...]
    untouched: Mapping[str, str]
    file_prefix: str
    module_prefix: str
    tied: bool
    second_names: frozenset[str]
    blocks: tuple[str, ...]

    @property
    def depth(self) -> int:
        return len(self.blocks)

    @property
    def known(self) -> bool:
        """Whether the table has an entry for this model type."""
        return self.model_type in ARCHITECTURES

    @property
    def by_name(self) -> bool:
        """Whether the layers were found by name: then their names are those in the file, and nothing is calibrated."""
        return not self.architecture.linears

    @property
    def has_experts(self) -> bool:
        """Whether some of the layers are those of experts."""
        return any(is_expert_group(layer.fused) for layer in self.layers)

    def block_name(self, index: int) -> str:
        """Module name of block `index`."""
        return self.blocks[index]

    def module_name(self, tensor: str) -> str:
        """Module name of a tensor in the file: the prefix exchanged, the last part dropped."""
        inner = tensor.removeprefix(self.file_prefix) if self.file_prefix else tensor
        prefix = self.module_prefix if inner != tensor or not self.file_prefix else ""
        return (prefix + inner).rpartition(".")[0]


def anatomy(checkpoint: Checkpoint) -> Anatomy:
    """Finds the linear layers of a checkpoint.

    Raises:
        UsageError: tensors that the table promises are not in the file, no linear layer is found in the headers of
            a model type without an entry, or the class is none that can be handled.
    """
    entry = ARCHITECTURES.get(checkpoint.model_type)
    if entry is None or not entry.linears:
        return _found(checkpoint, entry)
    return _listed(checkpoint, entry)


def _listed(checkpoint: Checkpoint, entry: Architecture) -> Anatomy:
    """By the table."""
    kind = _kind(checkpoint, entry)
    check_not_stacked(checkpoint.source, entry.experts, checkpoint.tensors)
    file_prefix = _file_prefix(checkpoint, entry)
    module_prefix = _module_prefix(checkpoint.config, entry)
    depth = _depth(checkpoint.config, entry)
    check_chosen(checkpoint.source, entry.experts, checkpoint.config, depth)
    layers, problems = [], []
    for block in range(depth):
        for suffix, fused in block_linears(entry.linears, entry.experts, checkpoint.config, block):
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
                layers.append(_layer(checkpoint, name, info, block, group, entry.transposed))
    if problems:
        raise UsageError(
            f"{checkpoint.source}: config.json says {checkpoint.model_type} with {depth} blocks, but the weights do "
            "not fit it:\n  " + "\n  ".join(problems[:20]) + _more(problems, 20),
            hint="The folder is incomplete, or config.json belongs to another model.",
        )
    tied = _tied(checkpoint)
    return Anatomy(
        model_type=checkpoint.model_type,
        kind=kind,
        architecture=entry,
        layers=tuple(layers),
        untouched=_untouched(checkpoint, {layer.tensor for layer in layers}, tied=tied and kind == "decoder"),
        file_prefix=file_prefix,
        module_prefix=module_prefix,
        tied=tied,
        second_names=frozenset({HEAD} if tied else ()),
        blocks=tuple(f"{module_prefix}{entry.blocks}.{block}" for block in range(depth)),
    )


def _found(checkpoint: Checkpoint, entry: Architecture | None) -> Anatomy:
    """By the names in the headers."""
    if parts := several_inputs(checkpoint.config):
        raise UsageError(
            f"{checkpoint.source}: {checkpoint.model_type} reads several kinds of input ({', '.join(parts)}), and this "
            "version of compress cannot make inputs to prove its result on.",
            hint="Save the part that is to be quantized as a model of its own.",
        )
    found = found_layers(checkpoint.tensors)
    if not found:
        raise UsageError(
            f"{checkpoint.source}: model type '{checkpoint.model_type}' is not known to this version of compress, and "
            "the headers show no linear layer (a weight of two dimensions inside a numbered list of blocks).",
            hint=f"Known model types: {', '.join(sorted(ARCHITECTURES))}.",
        )
    blocks = tuple(dict.fromkeys(one.place.block for one in found))
    numbers = {block: number for number, block in enumerate(blocks)}
    layers = tuple(
        _layer(checkpoint, one.name, one.info, numbers[one.place.block], one.group, transposed=False) for one in found
    )
    kind = kind_of_class(class_names(checkpoint.config)) if entry is None else entry.kind
    tied = _tied(checkpoint)
    second = _second_names(checkpoint, tied=tied)
    quantizable = {layer.tensor for layer in layers}
    return Anatomy(
        model_type=checkpoint.model_type,
        kind=kind,
        architecture=entry or found_by_name(kind),
        layers=layers,
        untouched=_untouched(checkpoint, quantizable, tied=tied and kind == "decoder", second=second),
        file_prefix="",
        module_prefix="",
        tied=tied,
        second_names=second,
        blocks=blocks,
    )


def is_weight(info: TensorInfo) -> bool:
    """Whether a tensor is a parameter: not ids, and not the causal masks that old GPT-2 files carry."""
    return info.dtype.startswith(("F", "BF")) and not _MASK.search(info.name)


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
    checkpoint: Checkpoint, name: str, info: TensorInfo, block: int, fused: str, transposed: bool
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
        bias=bias if bias in checkpoint.tensors else None,
        dtype=held_dtype(checkpoint.config, info.dtype),
    )


def _kind(checkpoint: Checkpoint, entry: Architecture) -> Kind:
    """What a model of the table answers with, which its class decides.

    Raises:
        UsageError: a class whose outputs this version cannot measure or whose layers it would not find.
    """
    classes = class_names(checkpoint.config)
    bare = not classes or classes[0] == entry.base_class
    generates = bool(classes) and classes[0].endswith(GENERATES)
    stem = entry.base_class.removesuffix("Model")
    if entry.kind == "encoder" and not generates and (bare or classes[0].startswith(f"{stem}For")):
        return "encoder"
    if entry.kind == "decoder" and generates:
        return "decoder"
    if entry.kind == "decoder" and classes and (bare or classes[0] == f"{stem}ForSequenceClassification"):
        return "encoder"  # embedding models and classifiers read a text, whatever their blocks were made for
    wanted = (
        f"{entry.base_class} or a {stem}For... class that generates no text"
        if entry.kind == "encoder"
        else f"a class that generates text (...ForCausalLM, GPT2LMHeadModel), {entry.base_class} or "
        f"{stem}ForSequenceClassification"
    )
    raise UsageError(
        f"{checkpoint.source}: config.json names the architecture {classes[0] if classes else 'none'}; for "
        f"{checkpoint.model_type} this version of compress handles {wanted}.",
        hint="Save the model from that class, or set `architectures` in config.json.",
    )


def _tied(checkpoint: Checkpoint) -> bool:
    """What config.json says, else what the class does; a file without a head of its own can only be tied."""
    stated = checkpoint.config.get("tie_word_embeddings")
    if stated is None:
        return HEAD not in checkpoint.tensors or checkpoint.model_type in TIED_BY_DEFAULT
    return bool(stated)


def _second_names(checkpoint: Checkpoint, *, tied: bool) -> frozenset[str]:
    """Embeddings of an encoder and a decoder that share one (T5, BART), and a head tied to it."""
    names = checkpoint.tensors
    shared = any(name.rpartition(".")[0].endswith("shared") for name in names)
    copies = [name for name in names if shared and re.search(r"(^|\.)(encoder|decoder)\.embed_tokens\.weight$", name)]
    heads = [name for name in names if tied and name in (HEAD, "proj_out.weight")]
    return frozenset([*copies, *heads])


_REASONS = (
    (re.compile(r"\.bias$"), "bias"),
    (re.compile(r"(norm|ln_\d|ln_f|LayerNorm)", re.IGNORECASE), "norm"),
    (
        re.compile(r"(^|\.)(lm_head|embed_out|proj_out|head|cls|score|classifier|pre_classifier|qa_outputs)\."),
        "output head, protected",
    ),
    (re.compile(r"(embed|embeddings|wte|wpe|shared)"), "embedding, protected"),
    (re.compile(r"(^|\.)(router|gate)\.weight$"), "router, protected"),
    (re.compile(r"(^|\.)conv\w*\."), "convolution"),
    (re.compile(r"relative_attention_bias"), "relative positions, protected"),
    (re.compile(r"pooler"), "pooler, outside the blocks"),
)


def _untouched(
    checkpoint: Checkpoint, quantizable: set[str], *, tied: bool, second: frozenset[str] = frozenset()
) -> dict[str, str]:
    """{tensor: reason}.

    Args:
        tied: the head of a decoder has no weight of its own.
        second: tensors that are another one's second name.
    """
    reasons = {}
    for name, info in checkpoint.tensors.items():
        if not is_weight(info):
            reasons[name] = "a buffer, no weight"
        elif name in second:
            reasons[name] = TIED
        elif name not in quantizable:
            found = (reason for pattern, reason in _REASONS if pattern.search(name))
            reasons[name] = next(found, "not a linear layer of a block")
    if tied:
        reasons[HEAD if HEAD in checkpoint.tensors else "lm_head"] = TIED
    return reasons


def _more(items: list[str], shown: int) -> str:
    return f"\n  ... and {len(items) - shown} more" if len(items) > shown else ""
