"""What overrides make of a plan, and which of them it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from compress.errors import UsageError
from compress.model.checkpoint import open_checkpoint
from compress.plan.fused import covering_glob
from compress.plan.planning import Plan, make_plan
from compress.recipe.schema import Recipe
from compress.scheme import Scheme

INT8 = Scheme(8, -1, activation_bits=8)
INT8_WEIGHT = Scheme(8, -1)


def planned(folder: Path, *overrides: dict[str, Any], **step: Any) -> Plan:
    fields = {"target": "int4", "overrides": overrides} | step
    recipe = Recipe.model_validate({"version": 1, "model": str(folder), "steps": [{"quantize": fields}]})
    return make_plan(recipe, open_checkpoint(folder))


def refused(folder: Path, *overrides: dict[str, Any], **step: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        planned(folder, *overrides, **step)
    return caught.value


def to(layers: str, target: str = "int8-weight", **more: Any) -> dict[str, Any]:
    return {"layers": layers, "target": target} | more


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny.tiny_llama(tmp_path / "m")  # hidden 64, intermediate 128, two blocks


def test_an_override_gives_its_layers_another_target(llama: Path) -> None:
    plan = planned(llama, to("*.down_proj"), group_size=32)
    assert plan.mixed
    for layer in plan.layers:
        down = layer.layer.name.endswith("down_proj")
        assert (layer.target, layer.scheme) == (("int8-weight", INT8_WEIGHT) if down else ("int4", Scheme(4, 32)))
    assert plan.split_groups == ()
    assert plan.algorithm == "gptq"
    assert not planned(llama).mixed


def test_later_entries_win_and_skip_wins_over_all(llama: Path) -> None:
    plan = planned(
        llama,
        to("mlp.*", "int8"),
        to("model.layers.1.mlp.*", "int4", group_size=32),
        to("o_proj", "int8-weight", group_size=64),
        skip=["model.layers.0.mlp.down_proj"],
    )
    found = {layer.layer.name.removeprefix("model.layers."): layer for layer in plan.layers}
    assert found["0.mlp.up_proj"].scheme == INT8
    assert found["1.mlp.up_proj"].scheme == Scheme(4, 32)
    assert found["0.self_attn.o_proj"].scheme == Scheme(8, 64)
    assert found["0.self_attn.q_proj"].scheme == Scheme(4, 64)
    assert found["0.mlp.down_proj"].skipped == "skip: model.layers.0.mlp.down_proj"
    assert (found["0.mlp.down_proj"].scheme, found["0.mlp.down_proj"].target) == (None, None)


def test_auto_group_sizes_look_at_their_own_layers_only(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", intermediate_size=96)
    plan = planned(folder, to("down_proj", "int4"))
    sizes = {layer.layer.name.rpartition(".")[2]: layer.scheme.group_size for layer in plan.layers if layer.scheme}
    assert (sizes["q_proj"], sizes["down_proj"]) == (64, 32)


def test_all_that_does_not_fit_is_told_at_once(llama: Path) -> None:
    error = refused(llama, to("down_proj", group_size=100), to("o_proj", "int4", group_size=48), group_size=100)
    for words in (
        "target int4: group size 100 does not divide the input width of 10 layers",
        "overrides[0] (down_proj): group size 100 does not divide the input width of 2 layers",
        "model.layers.1.mlp.down_proj: width 128",
        "overrides[1] (o_proj): group size 48 does not divide",
    ):
        assert words in error.message
    assert error.hint is not None
    assert "--group-size 64 or 32" in error.hint
    assert "group_size 128 or 64 or 32" in error.hint


def test_overrides_without_effect_say_why(llama: Path) -> None:
    error = refused(
        llama, to("k_porj"), to("lm_head"), to("q_proj", "int8"), to("down_proj"), to("mlp.*", "int8"), skip=["q_proj"]
    )
    lines = error.message.splitlines()
    assert lines[0] == "overrides[0] (k_porj): no layer that can be quantized matches."
    assert lines[1] == "overrides[1] (lm_head): no layer that can be quantized matches."
    assert lines[2].startswith("overrides[2] (q_proj): skip leaves every layer alone that it matches")
    assert lines[3].startswith("overrides[3] (down_proj): later overrides decide about every layer that it matches")
    assert len(lines) == 4
    assert error.hint is not None
    assert "down_proj" in error.hint


def test_an_override_that_splits_a_fused_group_is_an_error_with_the_glob_that_covers_it(llama: Path) -> None:
    error = refused(llama, to("q_proj"), to("model.layers.1.mlp.up_proj", "int8"))
    assert "self_attn: q_proj W8A16 channel; k_proj, v_proj W4A16 g64 (in every block)" in error.message
    assert "mlp: gate_proj W4A16 g64; up_proj W8A8 channel (in block 1)" in error.message
    assert error.hint is not None
    assert "self_attn.[kqv]_proj" in error.hint
    assert "*.1.mlp.[gu]*_proj" in error.hint
    plan = planned(llama, to("self_attn.[kqv]_proj"), to("*.1.mlp.[gu]*_proj", "int8"))
    names = {layer.layer.name for layer in plan.layers if layer.scheme == INT8}
    assert names == {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"}
    assert sum(layer.scheme == INT8_WEIGHT for layer in plan.layers) == 6


def test_group_sizes_split_a_fused_group_too(llama: Path) -> None:
    assert "v_proj W4A16 g32" in refused(llama, to("v_proj", "int4", group_size=32)).message


def test_a_group_that_is_partly_skipped_may_be_overridden(llama: Path) -> None:
    """H08 asks for skip of a part of a group; the rest of it still has one scheme."""
    plan = planned(llama, to("self_attn.[kv]_proj"), skip=["q_proj"])
    assert plan.split_groups == ("model.layers.0:qkv", "model.layers.1:qkv")


@pytest.mark.parametrize(
    ("members", "others", "glob"),
    [
        (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"], "self_attn.[kqv]_proj"),
        (["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"], "mlp.[gu]*_proj"),
        (["attention.self.query", "attention.self.key", "attention.self.value"], ["output.dense"], None),
    ],
)
def test_the_covering_glob(members: list[str], others: list[str], glob: str | None) -> None:
    import fnmatch

    found = covering_glob(members, others)
    assert glob is None or found == glob
    assert all(fnmatch.fnmatchcase(name, found) for name in members)
    assert not any(fnmatch.fnmatchcase(name, found) for name in others)


def test_the_bytes_of_a_mix_are_exact(llama: Path) -> None:
    """per weight: 4 bits and a bfloat16 scale per 32 columns, or 8 bits and one scale per row."""
    plans = [planned(llama, to("down_proj"), group_size=32, format=name) for name in ("compressed-tensors", "gptq")]
    for plan in plans:
        down = sum(layer.layer.parameters for layer in plan.layers if layer.target == "int8-weight")
        four = sum(layer.layer.parameters for layer in plan.layers if layer.target == "int4")
        assert (down, four) == (2 * 64 * 128, plan.quantized_parameters - down)
        assert plan.quantized_bytes > down + four / 2
    ct = plans[0]
    scales = sum(2 * layer.layer.out * layer.scheme.groups(layer.layer.width) for layer in ct.layers if layer.scheme)
    scale_bytes = scales * (2 if ct.scale_dtypes["model.layers.0.mlp.down_proj"] == "F32" else 1)
    assert ct.quantized_bytes == down + four // 2 + scale_bytes + 16 * len(ct.quantized)


def test_an_encoder_in_gptq_has_one_scheme(tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path / "m")
    error = refused(folder, to("intermediate.dense"), format="gptq")
    assert error.hint is not None
    assert "--format compressed-tensors" in error.hint
    assert planned(folder, to("intermediate.dense")).mixed
