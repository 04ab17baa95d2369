from __future__ import annotations

from dataclasses import replace

import pytest
from rich_report import mixed_layers
from sample_report import layer_records

from compress.records import LayerRecord, StepRecord
from compress.report.build import step_part
from compress.report.html.layer_strip import FAINTEST, Cell, Strip, strips


def strip_of(layers: list[LayerRecord]) -> Strip:
    (found,) = strips([step_part(StepRecord("quantize", {}, layers=tuple(layers)))])
    return found


def row(strip: Strip, kind: str) -> tuple[Cell | None, ...]:
    return dict(strip.grids[0].rows)[kind]


def expert(block: int, number: int, error: float | None) -> LayerRecord:
    name = f"model.layers.{block}.mlp.experts.{number}.up_proj"
    return LayerRecord(name, (8, 8), target="int4", scheme="W4A16 g64", error_after=error)


def test_kinds_down_and_blocks_across_in_the_order_of_the_model() -> None:
    found = strip_of(layer_records())
    assert found.grids[0].blocks == tuple(range(30))
    kinds = [kind for kind, _ in found.grids[0].rows]
    assert kinds[:2] == ["self_attn.q_proj", "self_attn.k_proj"]
    assert kinds[-1] == "mlp.gate"
    assert [name for name, _ in found.loose] == ["model.embed_tokens"]


def test_every_layer_is_counted_in_the_legend() -> None:
    layers = mixed_layers()
    legend = [(key.letter, key.label, key.count) for key in strip_of(layers).legend]
    assert legend == [("", "W4A16 g64", 180), ("A", "W8A16 channel", 30), ("", "unquantized", 31)]
    assert sum(count for *_, count in legend) == len(layers)


def test_schemes_differ_by_colour_and_by_letter() -> None:
    found = strip_of(mixed_layers())
    common, rare, kept = (row(found, kind)[0] for kind in ("self_attn.q_proj", "mlp.down_proj", "mlp.gate"))
    assert common is not None
    assert rare is not None
    assert kept is not None
    assert (common.letter, rare.letter) == ("", "A")
    assert len({common.colour, rare.colour, kept.colour}) == 3
    assert kept.colour == 0
    assert kept.title == "model.layers.0.mlp.gate: unquantized, router"


def test_the_larger_the_error_the_stronger_the_colour() -> None:
    cells = [cell for cell in row(strip_of(layer_records()), "self_attn.q_proj") if cell]
    strengths = [cell.strength for cell in cells]
    assert strengths == sorted(strengths)
    assert FAINTEST <= strengths[0] < strengths[-1] <= 1.0
    assert cells[0].title == "model.layers.0.self_attn.q_proj: W4A16 g64, error 0.00420"


@pytest.mark.parametrize("error", [None, 0.0, 0.01])
def test_layers_of_one_error_or_none_look_alike(error: float | None) -> None:
    cells = row(strip_of([expert(0, 0, error), expert(1, 0, error)]), "mlp.experts.*.up_proj")
    assert len({cell.strength for cell in cells if cell}) == 1


def test_the_worst_expert_speaks_for_all_of_its_block() -> None:
    skipped = replace(expert(0, 2, None), skipped="asked", scheme=None)
    found = strip_of([expert(0, 0, 0.01), expert(0, 1, 0.03), skipped, expert(1, 0, 0.02)])
    first, second = row(found, "mlp.experts.*.up_proj")
    assert first is not None
    assert second is not None
    assert first.title.startswith("3 layers, the worst: model.layers.0.mlp.experts.1.up_proj: W4A16 g64, error 0.03")
    assert "layers, the worst" not in second.title


def test_a_block_without_a_kind_leaves_a_gap() -> None:
    layers = [layer for layer in layer_records(3) if layer.name != "model.layers.1.mlp.up_proj"]
    assert row(strip_of(layers), "mlp.up_proj")[1] is None


def test_two_stacks_of_blocks_are_two_grids() -> None:
    both = [
        replace(layer, name=f"{side}.{layer.name}") for side in ("encoder", "decoder") for layer in layer_records(2)
    ]
    assert [grid.prefix for grid in strip_of(both).grids] == ["encoder.model.layers", "decoder.model.layers"]


def test_a_step_without_layers_has_no_strip() -> None:
    assert strips([step_part(StepRecord("cast", {}))]) == ()
