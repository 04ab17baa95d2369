"""How the formats name experts: by rules that vLLM, GPTQModel and transformers all ask in words of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_moe
from transformers.integrations.compressed_tensors import get_experts_scheme

from compress.formats import compressed_tensors, gptq, gptq_check
from compress.formats.layout import layer_tensors
from compress.model.anatomy import Anatomy, anatomy
from compress.model.checkpoint import open_checkpoint
from compress.scheme import Scheme

INT4, INT8 = Scheme(4, 32), Scheme(8, -1)
PATHS = {"mixtral": "block_sparse_moe.experts", "qwen3_moe": "mlp.experts"}
BUILDERS: dict[str, Callable[..., Path]] = {
    "mixtral": tiny_moe.tiny_mixtral,
    "qwen3_moe": tiny_moe.tiny_qwen3_moe,
}


@pytest.fixture(params=BUILDERS)
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> Anatomy:
    return anatomy(open_checkpoint(BUILDERS[request.param](tmp_path)))


def matched(targets: list[str], name: str) -> bool:
    return any(re.match(target.removeprefix("re:"), name) for target in targets)


def test_patterns_hold_for_the_names_that_vllm_asks_for(parts: Anatomy) -> None:
    mine = [layer for layer in parts.layers if ".experts." in layer.name]
    targets = compressed_tensors.patterns(mine, parts.layers)
    assert len(targets) == 1
    path = PATHS[parts.model_type]
    for layer in parts.layers:
        assert matched(targets, layer.name) == (layer in mine)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert matched(targets, f"model.layers.0.{path}.0.{name}")
    assert not matched(targets, f"model.layers.0.{path.removesuffix('.experts')}.gate")


def test_transformers_finds_the_scheme_of_experts(parts: Anatomy) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    schemes = {layer.name: INT8 if ".experts." in layer.name else INT4 for layer in parts.layers}
    block = compressed_tensors.quantization_config(parts.layers, schemes, ["lm_head"])
    kept = {key: value for key, value in block.items() if key in QuantizationConfig.model_fields}
    assert get_experts_scheme(QuantizationConfig(**kept)).weights.num_bits == 8


def faults(parts: Anatomy, schemes: dict[str, Scheme], config: dict[str, object], folder: Path) -> list[str]:
    names = {
        tensor.name
        for layer in parts.layers
        if layer.name in schemes
        for tensor in layer_tensors("gptq", layer, schemes[layer.name])
    }
    return gptq_check.faults(config, json.loads((folder / "config.json").read_text()), names)


@pytest.mark.parametrize("kind", ["override", "skip"])
def test_one_gptq_rule_holds_for_a_block_of_experts(kind: str, parts: Anatomy, tmp_path: Path) -> None:
    path = PATHS[parts.model_type]
    first = [layer for layer in parts.layers if layer.name.startswith(f"model.layers.0.{path}.")]
    schemes = {layer.name: INT4 for layer in parts.layers} | {layer.name: INT8 for layer in first}
    if kind == "skip":
        schemes = {name: scheme for name, scheme in schemes.items() if scheme == INT4}
    config = gptq.quantization_config(parts.layers, schemes, "gptq")
    assert len(config["dynamic"]) == 1
    assert "modules_in_block_to_quantize" not in config
    expected = None if kind == "skip" else {"bits": 8, "group_size": -1}
    for name in (path, f"{path}.3.w1", "mlp.experts.0.gate_proj"):
        assert gptq.override(config, f"model.layers.0.{name}") == expected
        assert gptq.override(config, f"model.layers.2.{name}") == {}
    for name in ("self_attn.q_proj", f"{path.removesuffix('.experts')}.gate", "mlp.gate_proj"):
        assert gptq.override(config, f"model.layers.0.{name}") == {}
    assert faults(parts, schemes, config, tmp_path) == []


def test_rules_that_other_loaders_would_not_find_are_faults(parts: Anatomy, tmp_path: Path) -> None:
    path = PATHS[parts.model_type]
    schemes = {layer.name: INT8 if layer.name.startswith(f"model.layers.0.{path}.") else INT4 for layer in parts.layers}
    config = gptq.quantization_config(parts.layers, schemes, "gptq")
    rule = rf"+:model\.layers\.0\.{re.escape(path)}\.\d+\.\w+$"  # the name that vLLM asks for is not in it
    config["dynamic"] = {rule: {"bits": 8, "group_size": -1}}
    found = faults(parts, schemes, config, tmp_path)
    assert any(f"model.layers.0.{path}: found {{}}, expected" in fault for fault in found)
    assert any("expected none by" not in fault for fault in found)
