"""A model as its files will be after pruning: config.json and headers, without weights. Without torch.

Kept blocks are numbered anew without gaps, the numbers of units are written where the model type has them, and lists
with one item per layer lose those of the removed layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

from compress.errors import UsageError
from compress.model.anatomy import Anatomy
from compress.model.checkpoint import SINGLE_FILE, Checkpoint, TensorInfo
from compress.model.prunable import head_size, heads_refusal, prunable, shape_of, unit_axes
from compress.model.shapes import Kept, Shape

_PER_LAYER = ("layer_types", "no_rope_layers")
"""Lists with one item per layer, as the listed model types have them."""
_LLAMA_ONLY = ("attention_bias", "mlp_bias", "pretraining_tp")
_LLAMA_POSITIONS = 2048  # what LlamaConfig takes where config.json says nothing; MistralConfig takes another number


def becomes_mistral(checkpoint: Checkpoint, anatomy: Anatomy, heads: int) -> bool:
    """Whether `heads` query heads need the model type mistral instead of llama.

    LlamaConfig refuses a hidden size that the number of heads does not divide (transformers 5), also where `head_dim`
    is stated; MistralConfig does not. Without biases both compute the same from tensors of the same names.
    """
    return _fits_mistral(checkpoint, anatomy) and not _divides(checkpoint, anatomy, heads)


def must_divide(checkpoint: Checkpoint, anatomy: Anatomy) -> bool:
    """Whether stock transformers accepts only numbers of query heads that divide the hidden size."""
    return prunable(anatomy).divides and not _fits_mistral(checkpoint, anatomy)


def stateable(checkpoint: Checkpoint, anatomy: Anatomy, heads: int) -> bool:
    """Whether stock transformers accepts a config.json with `heads` query heads of the size that this model has.

    Always false where heads cannot be pruned, and so cannot have another number.
    """
    if heads_refusal(checkpoint, anatomy) is not None:
        return False
    return not must_divide(checkpoint, anatomy) or _divides(checkpoint, anatomy, heads)


def pruned_config(checkpoint: Checkpoint, anatomy: Anatomy, after: Shape, kept_layers: Sequence[int]) -> dict[str, Any]:
    """config.json of a pruned model.

    Args:
        checkpoint, anatomy: the model before.
        kept_layers: indices of the layers that stay, ascending.
    """
    entry, before = prunable(anatomy), shape_of(checkpoint, anatomy)
    config = {key: value for key, value in checkpoint.config.items() if key not in ("per_layer_config", "pruned_heads")}
    if after.ffn != before.ffn:
        config |= _stated(config, entry.width, "intermediate_size", after.ffn)
    if (after.heads, after.kv_heads) != (before.heads, before.kv_heads):
        config |= {entry.heads: after.heads, "num_key_value_heads": after.kv_heads}
        config["head_dim"] = head_size(checkpoint, anatomy)
        if becomes_mistral(checkpoint, anatomy, after.heads):
            config = _as_mistral(config)
    if len(kept_layers) != before.layers:
        config |= _per_layer(config, anatomy, kept_layers)
        config |= _stated(config, anatomy.architecture.depth, "num_hidden_layers", len(kept_layers))
    return config


def pruned_checkpoint(
    checkpoint: Checkpoint, anatomy: Anatomy, after: Shape, kept_layers: Sequence[int] | None = None
) -> Checkpoint:
    """A pruned model: config and tensors with their exact names, shapes and dtypes, as in one file.

    Second names of tied tensors are left out. No weight can be read, and `shard_bytes` is empty: the files follow
    from the size of the largest one (`plan/pruning.py`).

    Args:
        kept_layers: indices of the layers that stay, ascending; None for as many of the first ones.
    """
    before = shape_of(checkpoint, anatomy)
    layers = tuple(range(after.layers)) if kept_layers is None else tuple(kept_layers)
    first = unit_axes(checkpoint, anatomy, first_units(before, after, 0))  # layers are alike
    cut = {_inside(anatomy, name): {axis: len(kept) for axis, kept in axes} for name, axes in first.items()}
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        new = pruned_name(anatomy, name, layers)
        if new is None or name in anatomy.second_names:
            continue
        lengths = cut.get(_inside(anatomy, name), {})
        shape = tuple(lengths.get(axis, length) for axis, length in enumerate(info.shape))
        tensors[new] = TensorInfo(new, info.dtype, shape, SINGLE_FILE)
    return replace(
        checkpoint,
        config=pruned_config(checkpoint, anatomy, after, layers),
        tensors=dict(sorted(tensors.items())),
        shard_bytes={},
        has_weights=False,
        quantized=None,
    )


def first_units(before: Shape, after: Shape, block: int) -> Kept:
    """The first units of each kind, as many as `after` has: stands for any choice where only numbers matter."""
    group, kept_per_group = before.heads // before.kv_heads, after.heads // after.kv_heads
    return Kept(
        block=block,
        ffn=tuple(range(after.ffn)),
        heads=tuple(kv * group + head for kv in range(after.kv_heads) for head in range(kept_per_group)),
        kv_heads=tuple(range(after.kv_heads)),
    )


def pruned_name(anatomy: Anatomy, name: str, kept_layers: Sequence[int]) -> str | None:
    """Name after pruning of a tensor of the source; None for one of a removed layer."""
    place = _block_of(anatomy, name)
    if place is None:
        return name
    stem, block, inside = place
    return f"{stem}{kept_layers.index(block)}.{inside}" if block in kept_layers else None


def source_name(anatomy: Anatomy, name: str, kept_layers: Sequence[int]) -> str:
    """Name in the source of a tensor of the pruned model; `anatomy` is the source's."""
    place = _block_of(anatomy, name)
    if place is None:
        return name
    stem, block, inside = place
    return f"{stem}{kept_layers[block]}.{inside}"


def _block_of(anatomy: Anatomy, name: str) -> tuple[str, int, str] | None:
    """(what comes before the block's number, the number, the name inside the block) of a block's tensor."""
    stem = f"{anatomy.file_prefix}{anatomy.architecture.blocks}."
    number, _, inside = name.removeprefix(stem).partition(".")
    return (stem, int(number), inside) if name.startswith(stem) and number.isdecimal() else None


def _fits_mistral(checkpoint: Checkpoint, anatomy: Anatomy) -> bool:
    """Whether a model is a llama without biases."""
    config = checkpoint.config
    biased = config.get("attention_bias") or config.get("mlp_bias") or any(layer.bias for layer in anatomy.layers)
    return anatomy.model_type == "llama" and not biased


def _inside(anatomy: Anatomy, name: str) -> str | None:
    """Name inside its block of a block's tensor; None for others."""
    place = _block_of(anatomy, name)
    return None if place is None else place[2]


def _divides(checkpoint: Checkpoint, anatomy: Anatomy, heads: int) -> bool:
    hidden = checkpoint.config.get(prunable(anatomy).hidden)
    return isinstance(hidden, int) and hidden % heads == 0


def _stated(config: Mapping[str, Any], name: str, other: str, value: int) -> dict[str, int]:
    """`value` under the names that config.json has for a number, or under the usual one."""
    names = [key for key in (name, other) if key in config]
    return dict.fromkeys(names or [name], value)


def _as_mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a llama without biases, for transformers' Mistral classes.

    AutoTokenizer warns of a fault in Mistral's own tokenizers where a folder of this type names a version before 5.
    """
    plain = {key: value for key, value in config.items() if key not in _LLAMA_ONLY}
    changed: dict[str, Any] = {
        "model_type": "mistral",
        "sliding_window": None,
        "transformers_version": metadata.version("transformers"),
    }
    if isinstance(stated := config.get("architectures"), list):
        changed["architectures"] = [
            f"Mistral{one.removeprefix('Llama')}" if isinstance(one, str) and one.startswith("Llama") else one
            for one in stated
        ]
    return {"max_position_embeddings": _LLAMA_POSITIONS} | plain | changed


def _per_layer(config: Mapping[str, Any], anatomy: Anatomy, kept_layers: Sequence[int]) -> dict[str, Any]:
    """What config.json says of single layers, for those that stay.

    Where the class fills a list in from the layers' numbers, the list is written out: the numbers change.
    """
    lists = layer_lists(config, anatomy)
    found: dict[str, Any] = {name: [items[layer] for layer in kept_layers] for name, items in lists.items()}
    edge = config.get("max_window_layers")  # in Qwen's models: the first layer that may have a sliding window
    if isinstance(edge, int):
        found["max_window_layers"] = sum(layer < edge for layer in kept_layers)
    return found


def layer_kinds(checkpoint: Checkpoint, anatomy: Anatomy) -> tuple[Hashable, ...]:
    """What config.json tells of a layer beyond the others'; equal for layers of one kind. Of each one has to stay."""
    lists = layer_lists(checkpoint.config, anatomy).values()
    return tuple(tuple(str(items[layer]) for items in lists) for layer in range(anatomy.depth))


def layer_lists(config: Mapping[str, Any], anatomy: Anatomy) -> dict[str, list[Any]]:
    """{name in config.json: one item per layer}, with the lists that the config class makes by itself.

    Raises:
        UsageError: a list has another number of items.
    """
    stated = {name: config[name] for name in _PER_LAYER if isinstance(config.get(name), list)}
    if wrong := [f"{name} has {len(items)} items" for name, items in stated.items() if len(items) != anatomy.depth]:
        raise UsageError(
            f"config.json: {', '.join(wrong)}; the model has {anatomy.depth} layers.",
            hint="correct config.json, or fetch the model again",
        )
    return _implied(config, anatomy.model_type, anatomy.depth) | stated


def _implied(config: Mapping[str, Any], model_type: str, depth: int) -> dict[str, list[Any]]:
    """Lists that the config classes of transformers 5 make where config.json has none."""
    layers = range(depth)
    if model_type in ("qwen2", "qwen3"):
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        edge = config.get("max_window_layers", 28)
        return {"layer_types": [_kind(window is not None and layer >= edge) for layer in layers]}
    if model_type == "gemma2":
        return {"layer_types": [_kind((layer + 1) % 2 != 0) for layer in layers]}
    if model_type == "gemma3_text":
        pattern = config.get("sliding_window_pattern", 6)
        return {"layer_types": [_kind((layer + 1) % pattern != 0) for layer in layers]}
    if model_type == "modernbert":
        pattern = config.get("global_attn_every_n_layers", 3)
        return {"layer_types": [_kind(layer % pattern != 0) for layer in layers]}
    if model_type == "smollm3":
        interval = config.get("no_rope_layer_interval", 4)
        rope = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in layers]
        windows = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
        return {"no_rope_layers": rope, "layer_types": [_kind(windows and not one) for one in rope]}
    return {}


def _kind(sliding: bool) -> str:
    return "sliding_attention" if sliding else "full_attention"
