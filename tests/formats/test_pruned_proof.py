"""A pruned folder is proved against its full-size original with zeros; every way of cutting it wrong is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_more
import torch
from pruned_folders import Cut, cut

from compress.errors import BrokenResultError
from compress.formats import proof_worker
from compress.formats.proof import ProofRecord, prove
from compress.formats.proof_blocks import METHOD
from compress.formats.pruned import full_size, full_size_outputs, scattered
from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.pruned import source_name
from compress.pipeline.proving import named_cases

LAYERS, KEPT = 3, (0, 2)


def failures(record: ProofRecord) -> set[str]:
    return {check.name for check in record.checks if not check.passed}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "m"
    return tiny.tiny_llama(folder, dtype=torch.bfloat16, num_hidden_layers=LAYERS)


@pytest.fixture
def good(model: Path) -> Cut:
    """Four of eight heads in both groups, half of the channels, two of three layers."""
    return cut(model, layers=KEPT, ffn=64, heads=4)


def test_the_fresh_process_proves_a_pruned_folder(good: Cut, tmp_path: Path) -> None:
    record = prove(good.job(good.write(tmp_path / "p")))
    assert [check.name for check in record.checks] == [
        *("files", "original", "config", "side files", "loading", "shapes", "outputs", "cache", "tie")
    ]
    assert record.checks[5].detail == "21 parameters of the loaded model have the planned shapes"
    assert record.kl_mean is not None
    assert record.kl_mean < 1e-9


MADE = {
    "kv_heads": ("llama", {"heads": 4, "kv_heads": 1, "ffn": 96}),
    "mistral instead of llama": ("llama", {"heads": 6, "ffn": 64}),
    "q and k norms": ("qwen3", {"heads": 4, "ffn": 64}),
    "biases of q, k and v": ("qwen2", {"heads": 4, "kv_heads": 1, "ffn": 64}),
    "fused layers": ("phi3", {"heads": 4, "kv_heads": 1, "ffn": 64}),
    "layers of two kinds": ("gemma3", {"heads": 4, "kv_heads": 1, "ffn": 64}),
    "layers without positions": ("smollm3", {"heads": 4, "ffn": 64}),
    "Conv1D": ("gpt2", {"ffn": 64}),
    "an encoder": ("bert", {"ffn": 64}),
    "a fused encoder": ("modernbert", {"ffn": 64}),
}


@pytest.mark.parametrize("case", MADE)
def test_every_kind_of_model(case: str, tmp_path: Path) -> None:
    name, numbers = MADE[case]
    maker = getattr(tiny, f"tiny_{name}", None) or getattr(tiny_more, f"tiny_{name}")
    source = maker(tmp_path / "m")
    depth = anatomy(open_checkpoint(source)).depth
    one = cut(source, layers=[0, *range(2, depth)], **numbers)
    record = proof_worker.run(one.job(one.write(tmp_path / "p")).as_json())
    assert record.passed, record.checks
    assert ("mistral" in case) == (_config(tmp_path / "p")["model_type"] != _config(source)["model_type"])


def _config(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found


def test_a_changed_tensor_that_was_not_cut_is_found(good: Cut, tmp_path: Path) -> None:
    name = "model.layers.2.input_layernorm.weight"
    stage = good.write(tmp_path / "p", replaced=good.replaced | {name: good.source.read(name) * 2})
    record = proof_worker.run(good.job(stage).as_json())
    assert failures(record) == {"original"}
    assert record.checks[1].detail == f"model.layers.1.input_layernorm.weight differs from the original's {name}"


def test_a_cut_tensor_with_other_values_is_found(good: Cut, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    stage = good.write(tmp_path / "p", replaced=good.replaced | {name: good.replaced[name].flip(0).contiguous()})
    assert failures(proof_worker.run(good.job(stage).as_json())) == {"original"}


def _swapped(tensor: torch.Tensor, axis: int, one: int, other: int, size: int = 8) -> torch.Tensor:
    """Two heads of `size` rows or columns in each other's places."""
    order = list(range(tensor.shape[axis] // size))
    order[one], order[other] = order[other], order[one]
    rows = [head * size + inside for head in order for inside in range(size)]
    return tensor.index_select(axis, torch.tensor(rows)).contiguous()


@pytest.mark.parametrize(("other", "found"), [(2, {"outputs"}), (1, set())])
def test_query_heads_in_each_others_places_are_found_where_they_have_other_keys(
    good: Cut, tmp_path: Path, other: int, found: set[str]
) -> None:
    """Heads 0 and 1 share their keys, so that their order is nothing; 2 has others. Hashes are those of the file."""
    wrong = dict(good.replaced)
    for part, axis in (("q_proj", 0), ("o_proj", 1)):
        name = f"model.layers.0.self_attn.{part}.weight"
        wrong[name] = _swapped(wrong[name], axis, 0, other)
    stage = good.write(tmp_path / "p", replaced=wrong)
    hashes = replace(good, replaced=wrong).job(stage).replaced_sha256
    record = proof_worker.run(good.job(stage, replaced_sha256=hashes).as_json())
    assert failures(record) == found


def test_rows_of_one_layer_and_columns_of_another_channel_are_found(good: Cut, tmp_path: Path) -> None:
    wrong = dict(good.replaced)
    name = "model.layers.0.mlp.up_proj.weight"
    wrong[name] = wrong[name].roll(1, 0).contiguous()
    stage = good.write(tmp_path / "p", replaced=wrong)
    hashes = replace(good, replaced=wrong).job(stage).replaced_sha256
    record = proof_worker.run(good.job(stage, replaced_sha256=hashes).as_json())
    assert failures(record) == {"outputs"}


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"head_dim": 16}, "config"),
        ({"num_attention_heads": 8}, "config"),
        ({"per_layer_config": {"0": {"intermediate_size": 32}}}, "config"),
    ],
)
def test_another_config_than_planned_is_found(
    good: Cut, tmp_path: Path, changes: dict[str, object], failed: str
) -> None:
    stage = good.write(tmp_path / "p", config={**good.planned.config, **changes})
    assert failures(proof_worker.run(good.job(stage).as_json())) == {failed}


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"head_dim": 16}, "loading"),  # the class then wants more rows than the file has
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}, "outputs"),  # it has all rows
        ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, "outputs"),
    ],
)
def test_a_wrong_config_is_found_even_if_it_is_the_planned_one(
    good: Cut, tmp_path: Path, changes: dict[str, object], failed: str
) -> None:
    config = {**good.planned.config, **changes}
    stage = good.write(tmp_path / "p", config=config)
    assert failures(proof_worker.run(good.job(stage, config=config).as_json())) == {failed}


def test_layers_in_another_order_are_found(good: Cut, tmp_path: Path) -> None:
    stage = good.write(tmp_path / "p", kept_layers=(2, 0))
    assert failures(proof_worker.run(good.job(stage).as_json())) == {"original"}
    names = {name: source_name(good.anatomy, name, (2, 0)) for name in good.planned.tensors}
    hashes = good.job(stage).replaced_sha256
    back = {before: name for name, before in good.job(stage).names.items()}  # type: ignore[union-attr]
    turned = {name: hashes[back[before]] for name, before in names.items() if back[before] in hashes}
    record = proof_worker.run(good.job(stage, names=names, replaced_sha256=turned).as_json())
    assert failures(record) == {"outputs"}


def test_a_loaded_parameter_of_another_shape_than_planned_is_found(good: Cut, tmp_path: Path) -> None:
    """As a model would have that takes what a file holds and makes something else of it."""
    job = good.job(good.write(tmp_path / "p")).as_json()
    model = proof_worker.load(tmp_path / "p", stock=True, trust_remote_code=False)
    assert proof_worker.check_shapes(model, job["planned"], every=True).passed
    name = "model.layers.0.mlp.gate_proj.weight"
    job["planned"][0]["tensors"][name] = ["BF16", [96, 64]]
    found = proof_worker.check_shapes(model, job["planned"], every=True)
    assert not found.passed
    assert found.detail == f"{name}: planned [96, 64], the loaded model has [64, 64]"
    del job["planned"][0]["tensors"][name]
    assert proof_worker.check_shapes(model, job["planned"], every=True).detail == (
        f"{name}: the loaded model has it, the plan has not"
    )
    assert proof_worker.check_shapes(model, job["planned"], every=False).passed


def test_a_model_that_memory_does_not_hold_is_proved_block_by_block(good: Cut, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    windows = [torch.arange(16), torch.arange(40, 56)]
    meant = full_size_outputs(good.source, good.anatomy, windows, kept=good.kept, replaced=good.replaced)
    whole = full_size(good.source, good.anatomy, kept=good.kept, replaced=good.replaced)
    with torch.inference_mode():
        assert torch.allclose(whole.base_model(windows[0].unsqueeze(0)).last_hidden_state[0], meant[0], atol=1e-5)
    save_file(named_cases(windows, meant), tmp_path / "outputs.safetensors")
    stage = good.write(tmp_path / "p")
    task = good.job(stage, by_block=True, logits=tmp_path / "outputs.safetensors")
    record = proof_worker.run(task.as_json())
    assert record.passed, record.checks
    assert record.method == METHOD
    save_file(named_cases(windows, [meant[1], meant[0]]), tmp_path / "outputs.safetensors")
    assert failures(proof_worker.run(task.as_json())) == {"outputs"}


def test_what_is_not_finite_is_not_written(good: Cut, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    broken = good.replaced[name].clone()
    broken[0, 0] = float("inf")
    with pytest.raises(BrokenResultError, match=r"layers\.0\.mlp\.down_proj\.weight: what is left .* not finite"):
        good.write(tmp_path / "p", replaced=good.replaced | {name: broken})


def test_what_was_to_be_cut_and_is_not_is_refused(good: Cut) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    less = {key: value for key, value in good.replaced.items() if key != name}
    with pytest.raises(BrokenResultError, match=f"were to lose units and have lost none: {name}"):
        full_size(good.source, good.anatomy, kept=good.kept, replaced=less)
    with pytest.raises(BrokenResultError, match=r"\[64, 63\] are left of it, planned were \[64, 64\]"):
        full_size(good.source, good.anatomy, kept=good.kept, replaced=good.replaced | {name: torch.zeros(64, 63)})


def test_scattered_along_two_axes() -> None:
    found = scattered("w", torch.tensor([[1.0, 2.0]]), (2, 3), ((0, (1,)), (1, (0, 2))))
    assert found.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 2.0]]
