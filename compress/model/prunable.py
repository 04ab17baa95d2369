"""The table of prunable model types: where the units of a block are, and what config.json calls their numbers.

A unit is a feed-forward channel, a query head, or a key and value head with all query heads that use it. It has rows in
the layers that produce it and columns in the output projection that uses it. Without torch.

Heads are pruned only where the stock class takes the size of a head from `head_dim`. The other classes divide the
hidden size by the number of heads, and would cut the same rows into other heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from compress.errors import UsageError
from compress.model.anatomy import Anatomy, LinearLayer
from compress.model.checkpoint import Checkpoint
from compress.model.shapes import Kept, Shape

Unit = Literal["ffn", "heads", "kv_heads"]
"""Kinds of units inside a block, named as in `Shape` and `Kept`."""

Axes = tuple[tuple[int, tuple[int, ...]], ...]
"""What is kept of a tensor: (axis, ascending indices) of every axis that is cut."""


@dataclass(frozen=True)
class Producer:
    """A linear layer whose output rows belong to units.

    Attributes:
        module: path inside a block.
        parts: the kinds that its rows are made of, from the first row on, each with all of its units.
    """

    module: str
    parts: tuple[Unit, ...]


@dataclass(frozen=True)
class Prunable:
    """One row of the table. All paths are those of modules inside a block.

    Attributes:
        attention_in: the layers that make queries, keys and values; empty where heads cannot be pruned.
        attention_out: the layer whose input columns are the query heads, one after the other.
        ffn_in, ffn_out: the same for feed-forward channels.
        width, heads, hidden: config.json's names for the number of channels, of query heads, and the hidden size.
        heads_fixed: why heads cannot be pruned, None where they can.
        divides: the config class refuses a hidden size that the number of query heads does not divide.
        first_stays: block 0 is made otherwise than the others and cannot be removed.
    """

    attention_in: tuple[Producer, ...]
    attention_out: str
    ffn_in: tuple[Producer, ...]
    ffn_out: str
    width: str = "intermediate_size"
    heads: str = "num_attention_heads"
    hidden: str = "hidden_size"
    heads_fixed: str | None = None
    divides: bool = False
    first_stays: bool = False


_QUERIES = Producer("self_attn.q_proj", ("heads",))
_KEYS = Producer("self_attn.k_proj", ("kv_heads",))
_VALUES = Producer("self_attn.v_proj", ("kv_heads",))
_GATED = Prunable(
    attention_in=(_QUERIES, _KEYS, _VALUES),
    attention_out="self_attn.o_proj",
    ffn_in=(Producer("mlp.gate_proj", ("ffn",)), Producer("mlp.up_proj", ("ffn",))),
    ffn_out="mlp.down_proj",
)
_DIVIDED = replace(_GATED, divides=True)
_NO_HEAD_SIZE = (
    "stock transformers has no setting for the size of a head here: it is the hidden size divided by the number of "
    "heads, so that a lower number would silently change the size of each head"
)
_SPANNING_NORM = (
    "q_norm and k_norm take the mean square over all heads together, so that removing one rescales all others"
)


def _plain(attention_out: str, ffn_in: str, ffn_out: str, **fields: Any) -> Prunable:
    """A feed-forward network without gate, and heads that cannot be pruned."""
    channels = (Producer(ffn_in, ("ffn",)),)
    return Prunable((), attention_out, channels, ffn_out, **{"heads_fixed": _NO_HEAD_SIZE} | fields)


_BERT = _plain("attention.output.dense", "intermediate.dense", "output.dense")

PRUNABLE: Mapping[str, Prunable] = {
    "llama": _DIVIDED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "smollm3": _GATED,
    "olmo2": replace(_GATED, attention_in=(), heads_fixed=_SPANNING_NORM),
    "phi3": Prunable(
        attention_in=(Producer("self_attn.qkv_proj", ("heads", "kv_heads", "kv_heads")),),
        attention_out="self_attn.o_proj",
        ffn_in=(Producer("mlp.gate_up_proj", ("ffn", "ffn")),),
        ffn_out="mlp.down_proj",
    ),
    "gemma": _GATED,
    "gemma2": _DIVIDED,
    "gemma3_text": _DIVIDED,
    "opt": _plain("self_attn.out_proj", "fc1", "fc2", width="ffn_dim"),
    "gpt2": _plain("attn.c_proj", "mlp.c_fc", "mlp.c_proj", width="n_inner", heads="n_head", hidden="n_embd"),
    "gpt_neox": _plain("attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": _plain(
        "attention.out_lin", "ffn.lin1", "ffn.lin2", width="hidden_dim", heads="n_heads", hidden="dim"
    ),
    "mpnet": replace(_BERT, attention_out="attention.attn.o"),
    "modernbert": Prunable(
        attention_in=(),
        attention_out="attn.Wo",
        ffn_in=(Producer("mlp.Wi", ("ffn", "ffn")),),
        ffn_out="mlp.Wo",
        heads_fixed=_NO_HEAD_SIZE,
        first_stays=True,  # it alone has no norm in front of its attention
    ),
}


def prunable(anatomy: Anatomy) -> Prunable:
    """The entry of a model.

    Raises:
        UsageError: there is none, with the reason.
    """
    if anatomy.architecture.experts is not None:
        raise UsageError(
            f"{anatomy.model_type}: models with experts are not pruned: each expert sees too few tokens of a "
            "calibration text to tell which of its channels matter.",
            hint="Quantize it instead, such as --target int4.",
        )
    entry = PRUNABLE.get(anatomy.model_type)
    if entry is None:
        raise UsageError(
            f"{anatomy.model_type}: this version of compress does not know where the heads and the feed-forward "
            "channels of this model type are, and so cannot prune it.",
            hint=f"Model types that can be pruned: {', '.join(sorted(PRUNABLE))}.",
        )
    return entry


def heads_refusal(checkpoint: Checkpoint, anatomy: Anatomy) -> str | None:
    """Why heads of a model cannot be pruned, None where they can."""
    if anatomy.model_type == "phi3" and _has_factors(checkpoint.config):
        return (
            "its rotary embedding has one factor for each pair of columns of a head, and stock transformers counts "
            "them against the hidden size divided by the number of heads"
        )
    return prunable(anatomy).heads_fixed


def layers_refusal(checkpoint: Checkpoint) -> str | None:
    """Why layers of a model cannot be removed, None where they can."""
    if checkpoint.config.get("scale_attn_by_inverse_layer_idx"):
        return "its attention is scaled by the number of the layer, which would change for all layers behind a gap"
    return None


def output_of(anatomy: Anatomy, block: int, unit: Unit) -> LinearLayer:
    """The output projection whose input columns are a block's units; heads and kv_heads share one."""
    entry = prunable(anatomy)
    path = entry.ffn_out if unit == "ffn" else entry.attention_out
    return _in_block(anatomy, block)[path]


def producers_of(anatomy: Anatomy, block: int, unit: Unit) -> tuple[tuple[LinearLayer, tuple[Unit, ...]], ...]:
    """The layers that make a block's units (heads and kv_heads share them), each with its parts: see `Producer`.

    Empty for heads that cannot be pruned.
    """
    entry = prunable(anatomy)
    inside = _in_block(anatomy, block)
    producers = entry.ffn_in if unit == "ffn" else entry.attention_in
    return tuple((inside[one.module], one.parts) for one in producers)


def head_size(checkpoint: Checkpoint, anatomy: Anatomy) -> int:
    """Columns of one query head in the attention's output projection. Raises UsageError as `shape_of`."""
    return output_of(anatomy, 0, "heads").width // shape_of(checkpoint, anatomy).heads


def columns(units: Sequence[int], size: int) -> tuple[int, ...]:
    """Positions of units that are `size` positions wide."""
    return tuple(unit * size + inside for unit in units for inside in range(size))


def shape_of(checkpoint: Checkpoint, anatomy: Anatomy) -> Shape:
    """The numbers of units, counted in the tensors; only the number of query heads is config.json's.

    Where heads cannot be pruned, so is that of key and value heads.

    Raises:
        UsageError: no entry for the model type, layers that differ in shape, or a number of heads that does not fit
            the tensors.
    """
    entry = prunable(anatomy)
    _check_alike(checkpoint, anatomy)
    heads = _stated_heads(checkpoint, entry)
    width = output_of(anatomy, 0, "heads").width
    kv_heads = heads if entry.attention_in else _stated_kv_heads(checkpoint, heads)
    shape = Shape(ffn=output_of(anatomy, 0, "ffn").width, heads=heads, kv_heads=kv_heads, layers=anatomy.depth)
    if width % heads == 0 and entry.attention_in:
        rows = sum(layer.out for layer, _ in producers_of(anatomy, 0, "heads"))
        parts = [part for one in entry.attention_in for part in one.parts]
        kv_rows = (rows - width * parts.count("heads")) // parts.count("kv_heads")
        shape = replace(shape, kv_heads=max(kv_rows * heads // width, 1))
    size = checkpoint.config.get("head_dim") if entry.attention_in else None
    stated = width if size is None else size * heads
    if width % heads or stated != width or heads % shape.kv_heads or not _fits(anatomy, shape):
        told = f"{entry.heads} {heads}" + (f" and head_dim {size}" if size is not None else "")
        raise UsageError(
            f"{checkpoint.source}: config.json says {told}, which does not fit the shapes of the tensors of "
            f"{anatomy.blocks[0]}.",
            hint="config.json belongs to another model; fetch the model again.",
        )
    return shape


def unit_axes(checkpoint: Checkpoint, anatomy: Anatomy, kept: Kept) -> dict[str, Axes]:
    """What is kept of the tensors of one block: {tensor name in the source: axes}.

    Tensors that stay whole are not named: biases of output projections, norms, and what loses no unit.
    """
    before = shape_of(checkpoint, anatomy)
    found: dict[str, Axes] = {}
    if len(kept.ffn) < before.ffn:
        found |= _block_axes(anatomy, kept, before, "ffn")
    if len(kept.heads) < before.heads:
        found |= _block_axes(anatomy, kept, before, "heads")
    return found


def _block_axes(anatomy: Anatomy, kept: Kept, before: Shape, unit: Unit) -> dict[str, Axes]:
    output = output_of(anatomy, kept.block, unit)
    found: dict[str, Axes] = {output.tensor: ((_column_axis(output), _positions(kept, before, output, unit)),)}
    for layer, parts in producers_of(anatomy, kept.block, unit):
        rows: list[int] = []
        start = 0
        for part in parts:
            size = 1 if part == "ffn" else output.width // before.heads
            chosen = columns(getattr(kept, part), size)
            rows += [start + row for row in chosen]
            start += size * int(getattr(before, part))
        if len(rows) < layer.out:
            found[layer.tensor] = ((1 - _column_axis(layer), tuple(rows)),)
            if layer.bias is not None:
                found[layer.bias] = ((0, tuple(rows)),)
    return found


def _positions(kept: Kept, before: Shape, output: LinearLayer, unit: Unit) -> tuple[int, ...]:
    """Input columns of an output projection that stay."""
    return columns(getattr(kept, unit), output.width // int(getattr(before, unit)))


def _column_axis(layer: LinearLayer) -> int:
    """Axis of the stored weight along which its input lies."""
    return 0 if layer.transposed else 1


def _in_block(anatomy: Anatomy, block: int) -> dict[str, LinearLayer]:
    """The linear layers of a block by their paths inside it."""
    stem = f"{anatomy.blocks[block]}."
    return {layer.name.removeprefix(stem): layer for layer in anatomy.layers if layer.block == block}


def _stated_heads(checkpoint: Checkpoint, entry: Prunable) -> int:
    heads = checkpoint.config.get(entry.heads, checkpoint.config.get("num_attention_heads"))
    if not isinstance(heads, int) or heads < 1:
        raise UsageError(
            f"{checkpoint.source}: config.json: {entry.heads} is {heads!r}; pruning needs the number of query heads, "
            "at least 1.",
            hint="correct config.json, or fetch the model again",
        )
    return heads


def _stated_kv_heads(checkpoint: Checkpoint, heads: int) -> int:
    """Key and value heads by config.json; as many as query heads where it does not say, or what cannot be."""
    stated = checkpoint.config.get("num_key_value_heads")
    return stated if isinstance(stated, int) and 1 <= stated <= heads and heads % stated == 0 else heads


def _sizes(anatomy: Anatomy) -> list[dict[str, str]]:
    """Of every block, by paths inside it, the sizes of the layers that units are in, in words."""
    entry = prunable(anatomy)
    paths = {*(one.module for one in (*entry.attention_in, *entry.ffn_in)), entry.attention_out, entry.ffn_out}
    found: list[dict[str, str]] = [{} for _ in anatomy.blocks]
    for layer in anatomy.layers:
        path = layer.name.removeprefix(f"{anatomy.blocks[layer.block]}.")
        if path in paths:
            found[layer.block][path] = f"{layer.out} x {layer.width} {'with' if layer.bias else 'without'} bias"
    return found


def _check_alike(checkpoint: Checkpoint, anatomy: Anatomy) -> None:
    sizes = _sizes(anatomy)
    usual = max(sizes, key=sizes.count)
    odd = [
        f"{anatomy.blocks[block]}.{path}: {size} instead of {usual[path]}"
        for block, found in enumerate(sizes)
        for path, size in found.items()
        if size != usual[path]
    ]
    if odd or checkpoint.config.get("per_layer_config"):
        listed = odd[:20] or ["config.json has a per_layer_config"]
        more = f"\n  ... and {len(odd) - 20} more" if len(odd) > 20 else ""
        raise UsageError(
            f"{checkpoint.source}: the layers of this model differ in shape, and a pruned model has the same numbers "
            "of heads and channels in every layer:\n  " + "\n  ".join(listed) + more,
            hint="Start from a model whose layers are alike.",
        )


def _fits(anatomy: Anatomy, shape: Shape) -> bool:
    """Whether the layers that make units have as many rows as these numbers of units need."""
    size = output_of(anatomy, 0, "heads").width // shape.heads
    wide = {"ffn": shape.ffn, "heads": shape.heads * size, "kv_heads": shape.kv_heads * size}
    produced = [*producers_of(anatomy, 0, "ffn"), *producers_of(anatomy, 0, "heads")]
    return all(layer.out == sum(wide[part] for part in parts) for layer, parts in produced)


def _has_factors(config: Mapping[str, Any]) -> bool:
    rope = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    return any(isinstance(one, Mapping) and one.get("short_factor") is not None for one in rope)
