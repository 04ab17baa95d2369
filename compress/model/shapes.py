"""The numbers of units that structured pruning changes, and which of the units are kept. Without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The prunable sizes of a model whose layers are all alike.

    Attributes:
        ffn: channels of each feed-forward network (config's `intermediate_size`).
        heads, kv_heads: query heads, and key and value heads, of each attention layer.
        layers: transformer layers.
    """

    ffn: int
    heads: int
    kv_heads: int
    layers: int


@dataclass(frozen=True)
class Kept:
    """Units of one layer that stay, each list ascending.

    Attributes:
        block: the layer's index in the original.
        ffn: channels.
        heads, kv_heads: query heads, and key and value heads; in every kept group as many query heads as in another.
    """

    block: int
    ffn: tuple[int, ...]
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
