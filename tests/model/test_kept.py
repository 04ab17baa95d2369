"""Kept units from records."""

from __future__ import annotations

from typing import Any

from compress.model.kept import REMOVED, kept_of, kept_units
from compress.model.shapes import Kept, Shape
from compress.records import LayerRecord

BEFORE = Shape(ffn=4, heads=6, kv_heads=3, layers=12)
BLOCKS = [f"model.layers.{index}" for index in range(12)]


def record(name: str, unit: str, kept: list[int]) -> LayerRecord:
    facts: dict[str, Any] = {"unit": unit, "of": 0, "kept": kept}
    return LayerRecord(name, (1, 1), pruning=facts)


def test_a_group_keeps_its_query_heads():
    assert kept_units(0, BEFORE, {"kv_heads": (0, 2)}) == Kept(0, (0, 1, 2, 3), (0, 1, 4, 5), (0, 2))


def test_a_group_stays_that_a_query_head_needs():
    assert kept_units(2, BEFORE, {"heads": (1, 4), "ffn": (3,)}) == Kept(2, (3,), (1, 4), (0, 2))
    assert kept_units(2, BEFORE, {"heads": (0, 3, 5)}).kv_heads == (0, 1, 2)


def test_every_block_that_was_not_removed_is_there():
    records = [
        record("model.layers.1.mlp.down_proj", "ffn", [0, 2]),
        record("model.layers.10.mlp.down_proj", "ffn", [1]),
        record("model.layers.1.self_attn.o_proj", "heads", [0, 2, 4]),
        LayerRecord("model.layers.11", (), skipped=REMOVED),
        LayerRecord("model.layers.1.self_attn.q_proj", (2, 2), notes=("fitted",)),
    ]
    kept = kept_of(records, BLOCKS, BEFORE)
    assert [one.block for one in kept] == list(range(11))
    assert kept[1] == Kept(1, (0, 2), (0, 2, 4), (0, 1, 2))
    assert kept[10].ffn == (1,)
    assert kept[0] == Kept(0, (0, 1, 2, 3), (0, 1, 2, 3, 4, 5), (0, 1, 2))
