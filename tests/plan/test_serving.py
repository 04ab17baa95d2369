"""What serving engines are said to load, for plans over tiny checkpoints and for hand-made shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_moe
from test_planning import planned

from compress.plan.serving import CLASSES, Serving, serving
from compress.scheme import Scheme

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def asked(folder: Path, **step: Any) -> Serving:
    plan = planned(folder, **step)
    (engine,) = serving(plan.checkpoint.config, plan.anatomy, plan.schemes, plan.format_name)
    return engine


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that every kernel takes."""
    return tiny.tiny_llama(tmp_path_factory.mktemp("wide") / "m", **WIDE)


@pytest.mark.parametrize(
    "step",
    [
        {"target": "int4"},
        {"target": "int4", "format": "gptq"},
        {"target": "int4", "symmetric": False},
        {"target": "int8-weight"},
        {"target": "bf16"},
        {"target": "int4", "overrides": [{"layers": "mlp.*", "target": "int8-weight"}]},
    ],
    ids=str,
)
def test_what_loads_without_conditions(wide: Path, step: dict[str, Any]) -> None:
    assert asked(wide, **step) == Serving("vLLM", loads=True, reasons=())


def test_narrow_layers_need_another_kernel(tmp_path: Path) -> None:
    engine = asked(tiny.tiny_llama(tmp_path / "m"), target="int4")
    assert engine.loads
    (condition,) = engine.reasons
    assert "--dtype half (Exllama): model.layers.0:qkv, " in condition
    assert condition.endswith("and 3 more")


def test_groups_that_no_kernel_of_gptq_has(wide: Path) -> None:
    engine = asked(wide, target="int4", format="gptq", group_size=16)
    assert not engine.loads
    assert "groups of 16" in engine.reasons[0]
    assert asked(wide, target="int4", group_size=16).loads


def test_zero_points(wide: Path, tmp_path: Path) -> None:
    gptq = asked(wide, target="int4", format="gptq_v2", symmetric=False)
    assert not gptq.loads
    assert "zero points" in gptq.reasons[0]
    eight = asked(wide, target="int8-weight", symmetric=False)
    assert eight.loads
    assert eight.reasons == ("only on Hopper (Machete): " + eight.reasons[0].partition(": ")[2],)
    narrow = asked(tiny.tiny_llama(tmp_path / "m", hidden_size=32, head_dim=4), target="int8-weight", symmetric=False)
    assert not narrow.loads
    assert "W8A16 channel asymmetric" in narrow.reasons[0]


def test_a_fused_matrix_that_is_half_quantized(wide: Path) -> None:
    engine = asked(wide, target="int4", skip=["*.1.self_attn.q_proj"])
    assert engine.loads is False
    assert engine.reasons == ("fused matrices of which the parts are stored in several ways: model.layers.1:qkv",)


def test_rounded_inputs_are_told_of_their_gpus(wide: Path) -> None:
    assert asked(wide, target="int8").reasons == ("INT8 activations have no CUTLASS kernel on Blackwell GPUs",)
    assert asked(wide, target="fp8") == Serving("vLLM", loads=True, reasons=())


def test_experts(tmp_path: Path) -> None:
    plan = planned(tiny_moe.tiny_mixtral(tmp_path / "m", **WIDE), target="int4")

    def engine(schemes: Mapping[str, Scheme]) -> Serving:
        return serving(plan.checkpoint.config, plan.anatomy, schemes, "compressed-tensors")[0]

    assert engine(plan.schemes) == Serving("vLLM", loads=True, reasons=())
    asymmetric = engine({name: replace(scheme, symmetric=False) for name, scheme in plan.schemes.items()})
    assert not asymmetric.loads
    assert "experts are read with symmetric codes only" in asymmetric.reasons[0]
    some = engine({name: scheme for name, scheme in plan.schemes.items() if ".experts.1." not in name})
    assert not some.loads
    assert "stored in several ways: model.layers.0:experts, model.layers.1:experts" in some.reasons[0]


def test_a_class_that_vllm_has_not(tmp_path: Path) -> None:
    engine = asked(tiny.tiny_distilbert(tmp_path / "m"), target="int8")
    assert not engine.loads
    assert "DistilBertModel" in engine.reasons[0]
    assert "DistilBertModel" not in CLASSES


def test_heads_of_a_broken_width(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", hidden_size=96, num_attention_heads=8, head_dim=8)
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 10}))
    engine = asked(folder, target="int8-weight")
    assert not engine.loads
    assert "hidden_size 96 is no multiple of num_attention_heads 10" in engine.reasons[0]
