"""Which units of a model a pruning step kept, read from its records. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compress.model.prunable import Unit, columns
from compress.model.shapes import Kept, Shape
from compress.records import LayerRecord

REMOVED = "removed"
"""Why a whole block has a record of its own."""


def kept_units(block: int, before: Shape, chosen: Mapping[Unit, Sequence[int]]) -> Kept:
    """All units of one block that stay.

    Args:
        chosen: the kinds some of which were removed, each with what stays, ascending. A key and value head that stays
            without more being said keeps all of its query heads, and one stays that any of its query heads needs.
    """
    shared = before.heads // before.kv_heads
    if "kv_heads" in chosen:
        kv_heads = tuple(chosen["kv_heads"])
        heads = columns(kv_heads, shared)
    else:
        heads = tuple(chosen.get("heads", range(before.heads)))
        kv_heads = tuple(dict.fromkeys(head // shared for head in heads))
    return Kept(block, tuple(chosen.get("ffn", range(before.ffn))), heads, kv_heads)


def kept_of(records: Sequence[LayerRecord], blocks: Sequence[str], before: Shape) -> tuple[Kept, ...]:
    """One for each block that stays, ascending.

    Args:
        records: of the step, in any order.
        blocks: module names of the original's blocks, see `Anatomy.blocks`.
    """
    removed = {record.name for record in records if record.skipped == REMOVED}
    chosen: dict[str, dict[Unit, Sequence[int]]] = {name: {} for name in blocks if name not in removed}
    places = {f"{name}.": name for name in chosen}
    for record in records:
        if record.pruning is not None:
            block = next(name for stem, name in places.items() if record.name.startswith(stem))
            chosen[block][record.pruning["unit"]] = record.pruning["kept"]
    return tuple(kept_units(index, before, chosen[name]) for index, name in enumerate(blocks) if name in chosen)
