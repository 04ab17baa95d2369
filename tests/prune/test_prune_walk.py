"""The pruning walk on tiny models of several architectures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from pruning import Walked, walk, windows
from safetensors.torch import load_file, save_file

from compress.errors import BrokenResultError, UsageError
from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.model.prunable import shape_of
from compress.prune.gradients import Gradients
from compress.prune.settings import PruneSettings, held_out
from compress.prune.walk import check_tokens

FFN = {"ffn": 64}
CASES = [
    (tiny.tiny_llama, {"ffn": 64, "heads": 4, "kv_heads": 1}),
    (tiny.tiny_llama, {"ffn": 64, "heads": 4}),
    (tiny.tiny_llama, {"ffn": 96, "heads": 3, "kv_heads": 1}),
    (tiny.tiny_gemma3, {"ffn": 64, "heads": 4}),
    (tiny.tiny_phi3, {"ffn": 64, "heads": 4, "kv_heads": 1}),
    (tiny.tiny_olmo2, FFN),
    (tiny.tiny_gpt2, {"ffn": 128}),
    (tiny.tiny_opt, FFN),
    (tiny.tiny_gpt_neox, FFN),
    (tiny.tiny_bert, FFN),
    (tiny.tiny_distilbert, FFN),
]


def stock(folder: Path, found: Walked | None = None) -> Any:
    """The stock model, with what a walk replaced scattered into it."""
    model = load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")
    if found is not None:
        state = model.state_dict()
        for name, tensor in found.scattered().items():
            state[name].copy_(tensor)
    return model


def outputs(folder: Path, ids: list[torch.Tensor], found: Walked | None = None) -> torch.Tensor:
    """Logits or hidden states of the stock model, with what a walk replaced scattered into it."""
    model = stock(folder, found)
    with torch.no_grad():
        results = [model(input_ids=window.unsqueeze(0)) for window in ids]
    return torch.cat([one.logits if "logits" in one else one.last_hidden_state for one in results])


def distance(folder: Path, found: Walked, ids: list[torch.Tensor]) -> float:
    return float((outputs(folder, ids, found) - outputs(folder, ids)).pow(2).mean())


@pytest.mark.parametrize(("make", "keep"), CASES)
def test_compensation_brings_the_model_closer_than_the_mask(tmp_path, make, keep):
    folder = make(tmp_path / "source")
    fitted = walk(folder, windows(20), keep=keep)
    masked = walk(folder, windows(20), keep=keep, compensate=False)
    fresh = [torch.randint(256, (48,), generator=torch.Generator().manual_seed(9)) for _ in range(4)]
    assert distance(folder, fitted, fresh) < distance(folder, masked, fresh)
    for measured, mask in zip(fitted.pruning("error_measured"), fitted.pruning("error_masked"), strict=True):
        assert measured <= mask


@pytest.mark.parametrize(("make", "keep"), CASES)
def test_every_block_has_the_shape_that_was_asked_for(tmp_path, make, keep):
    found = walk(make(tmp_path / "source"), windows(20), keep=keep)
    for kept in found.kept:
        for kind, count in keep.items():
            assert len(getattr(kept, kind)) == count
    for record in found.records:
        assert record.pruning is not None
        layer = next(layer for layer in found.anatomy.layers if layer.name == record.name)
        stored = found.replaced.get(layer.tensor, found.checkpoint.read(layer.tensor))
        assert record.shape == tuple(stored.T.shape if layer.transposed else stored.shape)
        assert stored.dtype == found.checkpoint.read(layer.tensor).dtype
    assert found.parts == [f"block-{index:05d}" for index in range(found.anatomy.depth)]


def test_whole_groups_and_equal_numbers_in_every_group(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "source")  # 8 heads in 2 groups
    groups = walk(folder, windows(20), keep={"heads": 4, "kv_heads": 1})
    assert {record.pruning["unit"] for record in groups.records if record.pruning} == {"kv_heads", "ffn"}
    assert all(kept.heads in ((0, 1, 2, 3), (4, 5, 6, 7)) for kept in groups.kept)
    alike = walk(folder, windows(20), keep={"heads": 6})
    assert all(sum(head < 4 for head in kept.heads) == 3 and kept.kv_heads == (0, 1) for kept in alike.kept)
    both = walk(folder, windows(20), keep={"heads": 3, "kv_heads": 1})
    assert all(kept.heads[-1] // 4 == kept.heads[0] // 4 == kept.kv_heads[0] for kept in both.kept)


@pytest.mark.parametrize("make", [tiny.tiny_llama, tiny.tiny_bert], ids=lambda function: function.__name__)
def test_obs_loses_less_than_random_choice(tmp_path, make):
    folder = make(tmp_path / "source")
    ours, random = (walk(folder, windows(40), keep=FFN, importance=name) for name in ("obs", "random"))
    for mine, other in zip(ours.pruning("error_measured"), random.pruning("error_measured"), strict=True):
        assert mine <= other
    assert sum(ours.pruning("error_measured")) < 0.9 * sum(random.pruning("error_measured"))


@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("name", ["magnitude", "activation", "random"])
def test_other_importances_choose_by_their_score(tmp_path, name, compensate):
    found = walk(tiny.tiny_llama(tmp_path / "source"), windows(20), keep=FFN, importance=name, compensate=compensate)
    assert all(len(kept.ffn) == 64 for kept in found.kept)
    if name == "magnitude":
        W = found.checkpoint.read("model.layers.0.mlp.down_proj.weight").float()
        assert set(found.kept[0].ffn) == set(W.pow(2).sum(0).argsort(descending=True)[:64].tolist())
    elif name == "random":
        again = walk(tmp_path / "source", windows(20), keep=FFN, importance=name, compensate=compensate, seed=1)
        assert found.kept[0].ffn != again.kept[0].ffn
        assert found.kept[0].ffn != found.kept[1].ffn


@pytest.mark.parametrize("name", ["magnitude", "random"])
def test_without_a_fit_they_need_no_text_and_change_no_number(tmp_path, name):
    folder = tiny.tiny_llama(tmp_path / "source")
    keep = {"ffn": 64, "heads": 4}
    found = walk(folder, keep=keep, importance=name, compensate=False)
    with_text = walk(folder, windows(20), keep=keep, importance=name, compensate=False)
    assert found.kept == with_text.kept
    assert found.replaced.keys() == with_text.replaced.keys()
    for tensor, cut in found.replaced.items():
        assert torch.equal(cut, with_text.replaced[tensor])
        source = found.checkpoint.read(tensor)
        full = found.scattered()[tensor]
        assert torch.equal(full[full != 0], source[full != 0])
    assert found.pruning("ridge") == [None] * 4
    assert all(record.tokens is None for record in found.records)


def test_removed_layers_are_passed_by_the_original_alone(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "source", num_hidden_layers=4)
    found = walk(folder, windows(20), kept_layers=(0, 2, 3))
    assert [kept.block for kept in found.kept] == [0, 2, 3]
    assert [record.name for record in found.records if record.skipped == "removed"] == ["model.layers.1"]
    assert not any(name.startswith("model.layers.1.") for name in found.replaced)
    # the first block has nothing to repair; the one behind the gap has
    assert not any(name.startswith("model.layers.0.") for name in found.replaced)
    assert "model.layers.2.mlp.down_proj.weight" in found.replaced
    assert found.pruning("error_measured")[3] < found.pruning("error_masked")[3]


@pytest.mark.parametrize("settings", [{"one_pass": False, "batch_size": 3}, {"spill": True}])
def test_windows_a_few_at_a_time_or_on_the_disk_have_the_same_result(tmp_path, settings):
    folder = tiny.tiny_gemma3(tmp_path / "source")
    more = settings | ({"spill": tmp_path / "spill"} if "spill" in settings else {})
    straight, other = (walk(folder, windows(), keep=FFN, **some) for some in ({}, more))
    assert straight.records == other.records
    assert all(torch.equal(tensor, other.replaced[name]) for name, tensor in straight.replaced.items())


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_walk_that_goes_on_ends_at_the_same_bytes(tmp_path, done):
    folder = tiny.tiny_llama(tmp_path / "source", num_hidden_layers=4)
    keep, kept_layers = {"ffn": 64, "heads": 4}, (0, 1, 3)
    straight = walk(folder, windows(), keep=keep, kept_layers=kept_layers)
    later = walk(folder, windows(), keep=keep, kept_layers=kept_layers, resumed=straight.resumed(done))
    assert later.records == straight.records
    assert later.parts == straight.parts[done:]
    rest = {name: tensor for _, replaced, _ in straight.by_part[done:] for name, tensor in replaced.items()}
    assert later.replaced.keys() == rest.keys()
    assert all(torch.equal(tensor, later.replaced[name]) for name, tensor in rest.items())


def test_too_little_text_is_refused(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "source")
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    before = shape_of(checkpoint, parts)
    with pytest.raises(UsageError, match="has 96 tokens to fit to, fewer than the 128 input columns") as caught:
        check_tokens(parts, before, replace(before, heads=4), windows(3), PruneSettings.held_out)
    assert "--no-compensate" in str(caught.value.hint)
    walk(folder, windows(1), keep=FFN, compensate=False)


def test_statistics_that_are_not_finite_name_the_first_layer(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3] = torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenResultError, match=r"^model\.layers\.1\.mlp\.down_proj: the calibration statistics"):
        walk(folder, windows(20), keep=FFN)


def test_dead_channels_go_first(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    dead = [5, 17, 100]
    tensors["model.layers.0.mlp.up_proj.weight"][dead] = 0
    tensors["model.layers.0.mlp.down_proj.weight"][:, dead] *= 100
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = walk(folder, windows(20), keep={"ffn": 120})
    assert not set(found.kept[0].ffn) & set(dead)


def last_block(folder: Path, ids: list[torch.Tensor], found: Walked | None = None) -> list[torch.Tensor]:
    """What leaves the last block of a Llama, and what its FFN adds there, [windows, T, d]; see `stock`."""
    seen: dict[str, list[torch.Tensor]] = {"block": [], "ffn": []}
    model = stock(folder, found)
    block = model.model.layers[-1]
    block.register_forward_hook(lambda _module, _args, output: seen["block"].append(output))
    block.mlp.register_forward_hook(lambda _module, _args, output: seen["ffn"].append(output))
    with torch.no_grad():
        for window in ids:
            model(input_ids=window.unsqueeze(0))
    return [torch.cat(states) for states in seen.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_error_is_that_of_the_stored_model_on_windows_that_were_not_fitted_to(tmp_path, dtype):
    folder = tiny.tiny_llama(tmp_path / "source", dtype=dtype)
    found = walk(folder, windows(20), keep={"ffn": 64, "heads": 6})
    assert {tensor.dtype for tensor in found.replaced.values()} == {dtype}
    held = [windows(20)[number] for number in held_out(20, 0.1)]
    here, (there, ffn) = last_block(folder, held, found)[0], last_block(folder, held)
    error, output = (one.pow(2).sum() for one in (here - there, ffn))
    assert found.pruning("error_measured")[-1] == pytest.approx(float(error / output), rel=1e-3)


def test_the_predicted_error_is_near_the_measured_one(tmp_path):
    found = walk(tiny.tiny_llama(tmp_path / "source"), windows(60, 96), keep=FFN, held_out=0.3)
    pairs = list(zip(found.pruning("error_predicted"), found.pruning("error_measured"), strict=True))
    assert sum(measured > 0 for _, measured in pairs) >= 3
    for predicted, measured in pairs:
        assert predicted == pytest.approx(measured, rel=0.15, abs=1e-9)


def test_held_out_windows_are_spread():
    assert held_out(64, 0.1) == (5, 16, 26, 37, 48, 58)
    assert held_out(2, 0.1) == (1,)
    assert held_out(1, 0.1) == (0,)
    assert held_out(0, 0.1) == ()


def test_gradients_weigh_outputs_and_taylor_scores_choose(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "source")
    parts = walk(folder, windows(20), keep=FFN)
    names = [layer.name for layer in parts.anatomy.layers if layer.name.endswith(("o_proj", "down_proj"))]
    fisher = {name: torch.diag(torch.cat([torch.full((8,), 1e3), torch.full((56,), 1e-3)])) for name in names}
    weighed = walk(folder, windows(20), keep=FFN, gradients=Gradients(fisher, {}))
    assert [kept.ffn for kept in weighed.kept] != [kept.ffn for kept in parts.kept]
    scores = torch.arange(128, dtype=torch.float64).flip(0).unsqueeze(0)
    taylor = {name: scores for name in names if name.endswith("down_proj")}
    found = walk(folder, windows(20), keep=FFN, importance="taylor", gradients=Gradients({}, taylor))
    assert all(kept.ffn == tuple(range(64)) for kept in found.kept)


def test_drift_of_what_was_fitted_to_is_predicted_to_be_larger_elsewhere(tmp_path):
    """Few tokens, several layers: the fitted text's own errors tell less and less."""
    folder = tiny.tiny_llama(tmp_path / "source", num_hidden_layers=4)
    found = walk(folder, windows(60, 96), keep=FFN, held_out=0.3)
    fitted, predicted, measured = (found.pruning(f"error_{name}") for name in ("fitted", "predicted", "measured"))
    assert fitted[-1] < 0.9 * measured[-1]
    assert predicted[-1] == pytest.approx(measured[-1], rel=0.15)
