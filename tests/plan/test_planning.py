"""What a plan refuses and what it promises, over tiny checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from compress.errors import UsageError
from compress.model.checkpoint import TensorInfo, open_checkpoint
from compress.plan.planning import Plan, make_plan
from compress.recipe.schema import Recipe


def recipe(folder: Path | str, **step: Any) -> Recipe:
    fields = {"target": "int4"} | step
    return Recipe.model_validate({"version": 1, "model": str(folder), "steps": [{"quantize": fields}]})


def planned(folder: Path, **step: Any) -> Plan:
    return make_plan(recipe(folder, **step), open_checkpoint(folder))


def test_group_size_that_does_not_divide_lists_every_offender(tmp_path: Path) -> None:
    """H01, first case."""
    folder = tiny.tiny_llama(tmp_path / "m", intermediate_size=96)
    with pytest.raises(UsageError) as caught:
        planned(folder, group_size=64)
    message = str(caught.value)
    for layer in ("model.layers.0.mlp.down_proj: width 96", "model.layers.1.mlp.down_proj: width 96"):
        assert layer in message
    assert "up_proj" not in message
    assert caught.value.hint is not None
    assert "--group-size 32" in caught.value.hint
    assert "-1" in caught.value.hint


def test_group_larger_than_the_width_is_an_error(tmp_path: Path) -> None:
    """H01, second case."""
    folder = tiny.tiny_llama(tmp_path / "m")
    with pytest.raises(UsageError, match="larger than a layer's width"):
        planned(folder, group_size=128)


@pytest.mark.parametrize(("asked", "expected"), [("auto", 32), (None, 32), (32, 32), (-1, -1)])
def test_group_size(asked: Any, expected: int, tmp_path: Path) -> None:
    """auto is the largest of 128, 64, 32 that divides every width: 64 and 96 share 32."""
    folder = tiny.tiny_llama(tmp_path / "m", intermediate_size=96)
    assert {scheme.group_size for scheme in planned(folder, group_size=asked).schemes.values()} == {expected}


def test_auto_that_fits_nothing_names_the_layers(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", intermediate_size=80)
    with pytest.raises(UsageError, match=r"down_proj: width 80"):
        planned(folder)


def test_int8_weight_defaults_to_channels(tmp_path: Path) -> None:
    plan = planned(tiny.tiny_llama(tmp_path / "m"), target="int8-weight")
    assert {scheme.group_size for scheme in plan.schemes.values()} == {-1}
    assert plan.algorithm == "rtn"


def test_skip_adds_to_what_is_protected(tmp_path: Path) -> None:
    """H08: a skip list never un-protects the tied head."""
    plan = planned(tiny.tiny_opt(tmp_path / "m"), skip=["q_proj"])
    assert len(plan.quantized) == 10
    assert all(not layer.layer.name.endswith("q_proj") for layer in plan.quantized)
    assert plan.anatomy.untouched["lm_head"].startswith("tied")
    assert plan.anatomy.untouched["model.decoder.embed_tokens.weight"].startswith("embedding")


@pytest.mark.parametrize("glob", ["q_porj", "model.layers.9.*", "*.experts.*"])
def test_a_glob_that_matches_nothing_is_an_error(glob: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layer matches"):
        planned(tiny.tiny_llama(tmp_path / "m"), skip=[glob, "k_proj"])


def test_a_glob_may_name_what_is_protected(tmp_path: Path) -> None:
    plan = planned(tiny.tiny_llama(tmp_path / "m"), skip=["lm_head", "embed_tokens"])
    assert len(plan.quantized) == 14


def test_skipping_everything_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leaves no layer"):
        planned(tiny.tiny_llama(tmp_path / "m"), skip=["*"])


def test_gpt2_is_written_as_gptq_only(tmp_path: Path) -> None:
    folder = tiny.tiny_gpt2(tmp_path / "m")
    with pytest.raises(UsageError, match="Conv1D") as caught:
        planned(folder)
    assert caught.value.hint is not None
    assert "--format gptq" in caught.value.hint
    with pytest.raises(UsageError, match="Conv1D"):
        planned(folder, target="int8")
    assert len(planned(folder, format="gptq").quantized) == 8


def test_an_unknown_model_type_is_walked_and_rounded_to_nearest(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "frobnicator"}))
    with pytest.raises(UsageError, match="for frobnicator there is none yet: use --algorithm rtn"):
        planned(folder)
    plan = planned(folder, algorithm="rtn")
    assert not plan.anatomy.known
    assert len(plan.quantized) == 14


def test_a_known_model_type_whose_weights_are_others_is_refused(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mixtral", "num_local_experts": 2}))
    with pytest.raises(UsageError, match="weights do not fit"):
        planned(folder)


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"quantized already \(awq\)"):
        planned(folder)


@pytest.mark.parametrize(
    ("name", "gate", "target"),
    [
        ("bert", "kl.mean <= 0.1", "int4"),
        ("bert", "latency.tpot <= 9ms", "int4"),
        ("llama", "cosine.mean >= 0.9", "int4"),
        ("llama", "bits_per_weight <= 5", "bf16"),
    ],
)
def test_a_gate_that_can_never_be_measured_is_refused(name: str, gate: str, target: str, tmp_path: Path) -> None:
    folder = getattr(tiny, f"tiny_{name}")(tmp_path / "m")
    wanted = {"version": 1, "model": str(folder), "steps": [{"quantize": {"target": target}}], "gates": [gate]}
    with pytest.raises(UsageError, match=gate.split()[0]):
        make_plan(Recipe.model_validate(wanted | {"bench": {}}), open_checkpoint(folder))


def test_a_buffer_is_no_weight(tmp_path: Path) -> None:
    """Old BERT files hold position_ids, which is a matrix of integers."""
    folder = tiny.tiny_bert(tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    name = "embeddings.position_ids"
    tensors = dict(checkpoint.tensors) | {name: TensorInfo(name, "I64", (1, 128), "model.safetensors")}
    plan = make_plan(recipe(folder), replace(checkpoint, tensors=dict(sorted(tensors.items()))))
    assert plan.anatomy.untouched[name] == "a buffer, no weight"
    assert plan.parameters == planned(folder).parameters


@pytest.mark.parametrize(
    ("name", "architectures"),
    [
        ("llama", None),
        ("gpt2", ["GPT2DoubleHeadsModel"]),
    ],
)
def test_classes_that_cannot_be_measured_are_refused(name: str, architectures: Any, tmp_path: Path) -> None:
    folder = getattr(tiny, f"tiny_{name}")(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": architectures}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="architecture"):
        planned(folder, format="gptq")


def test_float64_weights_are_refused(tmp_path: Path) -> None:
    import torch

    with pytest.raises(UsageError, match="F64"):
        planned(tiny.tiny_llama(tmp_path / "m", dtype=torch.float64))


def test_a_bench_that_exceeds_the_positions_is_refused(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")  # 128 positions
    wanted = {"version": 1, "model": str(folder), "steps": [{"quantize": {"target": "int4"}}], "bench": {}}
    with pytest.raises(UsageError, match="175 positions; the model has 128"):
        make_plan(Recipe.model_validate(wanted), open_checkpoint(folder))


def test_split_groups_are_told(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    assert planned(folder, skip=["q_proj"]).split_groups == ("model.layers.0:qkv", "model.layers.1:qkv")
    assert planned(folder, skip=["q_proj", "k_proj", "v_proj"]).split_groups == ()


def test_a_tied_head_that_is_stored_as_well_counts_once(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    untied = planned(folder).parameters
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert planned(folder).parameters == untied - 256 * 64


def test_old_gpt2_masks_are_no_weights(tmp_path: Path) -> None:
    folder = tiny.tiny_gpt2(tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    mask = TensorInfo("transformer.h.0.attn.bias", "F32", (1, 1, 128, 128), "model.safetensors")
    tensors = dict(checkpoint.tensors) | {mask.name: mask}
    plan = make_plan(recipe(folder, format="gptq"), replace(checkpoint, tensors=dict(sorted(tensors.items()))))
    assert plan.parameters == planned(folder, format="gptq").parameters


def test_missing_tensors_are_all_listed(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: missing"):
        planned(folder)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "smollm3",
        "olmo2",
        "phi3",
        "gpt_neox",
        "gemma2",
        "gemma3",
        "opt",
        "bert",
        "roberta",
        "distilbert",
    ],
)
def test_every_matrix_is_quantized_or_explained(name: str, tmp_path: Path) -> None:
    plan = planned(getattr(tiny, f"tiny_{name}")(tmp_path / "m"))
    layers = {layer.layer.tensor for layer in plan.layers}
    for tensor, info in plan.checkpoint.tensors.items():
        if len(info.shape) == 2:
            assert (tensor in layers) != (tensor in plan.anatomy.untouched)
    assert all(plan.anatomy.untouched.values())
    assert len(plan.quantized) == len(plan.layers)


def test_a_model_of_a_thousand_layers(tmp_path: Path) -> None:
    """From headers alone: no file of such a model exists here."""
    folder = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=1)
    small = open_checkpoint(folder)
    tensors: dict[str, TensorInfo] = {}
    for name, info in small.tensors.items():
        for block in range(150 if ".layers.0." in name else 1):
            other = name.replace(".layers.0.", f".layers.{block}.")
            tensors[other] = replace(info, name=other)
    config = dict(small.config) | {"num_hidden_layers": 150}
    plan = make_plan(recipe(folder), replace(small, config=config, tensors=dict(sorted(tensors.items()))))
    assert len(plan.quantized) == 1050
    assert plan.weight_bytes > 140 * sum(shard.nbytes for shard in planned(folder).shards) // 10
