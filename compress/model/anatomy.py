"""What a checkpoint is made of, by the table of architectures and the headers of its files. Without torch.

Everything that an entry of the table does not name is left alone, with a reason that the plan and the report print.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.errors import UsageError
from compress.model.architectures import ARCHITECTURES, Architecture, Kind
from compress.model.checkpoint import Checkpoint, TensorInfo

HEAD = "lm_head.weight"
TIED = "tied to the input embedding, protected"
WEIGHT_DTYPES = ("F32", "F16", "BF16")
_MASK = re.compile(r"\.attn\.(masked_)?bias$")


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
