"""Plans for models with experts: what is refused because nothing would load it, and how the plan reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_moe

from compress.errors import UsageError
from compress.model.checkpoint import open_checkpoint
from compress.plan.planning import Plan, make_plan
from compress.recipe.schema import Recipe
from compress.report.plan_text import folded

EXPERTS = "block_sparse_moe.experts"


def planned(folder: Path, **step: Any) -> Plan:
    fields = {"target": "int4", "group_size": 32} | step
    recipe = Recipe.model_validate({"version": 1, "model": str(folder), "steps": [{"quantize": fields}]})
    return make_plan(recipe, open_checkpoint(folder))


def refused(folder: Path, **step: Any) -> str:
    with pytest.raises(UsageError) as caught:
        planned(folder, **step)
    return f"{caught.value.message} {caught.value.hint}"


def to(layers: str, target: str = "int8-weight") -> list[dict[str, Any]]:
    return [{"layers": layers, "target": target}]


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return tiny_moe.tiny_mixtral(tmp_path / "mixtral")


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return tiny_moe.tiny_qwen3_moe(tmp_path / "qwen")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"target": "int8", "group_size": None}, "cannot read them from 8-bit integers"),
        ({"target": "fp8", "group_size": None}, "would not round its inputs"),
        ({"target": "nf4", "group_size": None}, "bitsandbytes#1849"),
        ({"target": "int8-bnb", "group_size": None}, "bitsandbytes#1849"),
        ({"format": "gguf"}, "cannot be written as gguf"),
        ({"symmetric": False}, "llm-compressor#2628"),
        ({"symmetric": False, "format": "gptq_v2"}, "llm-compressor#2628"),
    ],
)
def test_what_no_loader_takes_is_refused(mixtral: Path, step: dict[str, Any], words: str) -> None:
    assert words in refused(mixtral, **step)


@pytest.mark.parametrize("format_name", ["compressed-tensors", "gptq"])
def test_skip_cannot_leave_some_experts_of_a_block(mixtral: Path, format_name: str) -> None:
    for glob in ("experts.3.*", "w2", "model.layers.1.*.experts.0.*"):
        message = refused(mixtral, format=format_name, skip=[glob])
        assert "half quantized" in message
        assert f"({EXPERTS}.*)" in message
    assert "experts of block 1 half" in message


def test_whole_blocks_of_experts_can_be_left_alone_in_gptq(mixtral: Path) -> None:
    plan = planned(mixtral, format="gptq", skip=[f"*.0.{EXPERTS}.*"])
    assert sum(layer.scheme is not None for layer in plan.layers) == 2 * 4 + 12
    assert plan.split_groups == ()
    message = refused(mixtral, skip=[f"*.0.{EXPERTS}.*"])
    assert "by one scheme" in message
    assert "--format gptq" in message


def test_all_experts_can_be_left_alone_in_gptq_only(mixtral: Path) -> None:
    assert sum(layer.scheme is not None for layer in planned(mixtral, format="gptq", skip=["experts.*"]).layers) == 8
    assert "skip leaves all experts alone" in refused(mixtral, skip=["experts.*"])


def test_overrides_cannot_split_the_experts_of_a_block(mixtral: Path) -> None:
    for glob in ("experts.3.*", "w2"):
        for format_name in ("compressed-tensors", "gptq"):
            message = refused(mixtral, format=format_name, overrides=to(glob))
            assert "several schemes" in message
            assert f"Cover the whole group with one glob: {EXPERTS}.*." in message
    assert f"{EXPERTS}: 0.w1, 0.w3, 1.w1" in message


def test_experts_can_have_a_scheme_of_their_own(mixtral: Path) -> None:
    plan = planned(mixtral, overrides=to("experts.*"))
    assert {layer.target for layer in plan.layers if ".experts." in layer.layer.name} == {"int8-weight"}
    assert {layer.target for layer in plan.layers if ".experts." not in layer.layer.name} == {"int4"}
    assert "by one scheme" in refused(mixtral, overrides=to(f"*.0.{EXPERTS}.*"))
    assert planned(mixtral, format="gptq", overrides=to(f"*.0.{EXPERTS}.*")).mixed


def test_dense_layers_are_none_of_the_experts(qwen: Path) -> None:
    plan = planned(qwen, overrides=to("mlp.down_proj"), skip=["mlp.gate_proj"])
    fates = {layer.layer.name.rpartition("layers.")[2]: layer.target for layer in plan.layers}
    assert fates["1.mlp.down_proj"] == "int8-weight"
    assert fates["1.mlp.gate_proj"] is None
    assert fates["0.mlp.experts.0.down_proj"] == fates["2.mlp.experts.3.gate_proj"] == "int4"


def test_experts_that_are_planned_alike_share_a_row(qwen: Path) -> None:
    rows = folded(planned(qwen))
    assert "model.layers.{0,2}.mlp.experts.{0..3}.gate_proj" in rows
    assert "model.layers.1.mlp.gate_proj" in rows
    assert len(rows) == 4 + 3 + 3
    assert sum(len(members) for members in rows.values()) == len(planned(qwen).layers)


def test_predicted_sizes_count_every_expert_once(mixtral: Path) -> None:
    plan = planned(mixtral, format="gptq")
    assert plan.quantized_parameters == 2 * (64 * 64 * 2 + 32 * 64 * 2 + 4 * 3 * 64 * 64)
    bits = 4 + 16 / 32 + 4 / 32  # codes, scales and zero points; g_idx beside them
    g_idx = sum(4 * layer.layer.width for layer in plan.quantized)
    assert plan.quantized_bytes == plan.quantized_parameters * bits / 8 + g_idx
