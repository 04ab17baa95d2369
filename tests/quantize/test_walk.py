"""The walk over real (tiny) models: what it hands out, what it refuses, and what may not change its result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from walking import SCHEME, WholeModel, edit, walk, windows

from compress.errors import BrokenResultError
from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.progress import Silent
from compress.quantize.gptq import GptqSettings
from compress.quantize.layer import LayerPlan, weight_sha256
from compress.quantize.walk import quantize_nearest_all
from compress.scheme import QuantizedWeight, Scheme

WAYS = {"one pass": {"one_pass": True}, "several passes": {"one_pass": False}}
ONE_STREAM = GptqSettings(asymmetric=False)


def test_records(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    found = walk(folder, windows(4, 16))
    assert found.parts == ["block-00000", "block-00001"]
    names = [layer.name for layer in anatomy(open_checkpoint(folder)).layers]
    assert [record.name for record in found.records] == names
    for record in found.records:
        assert record.shape == tuple(found.weights[record.name].codes.shape)
        assert (record.target, record.algorithm, record.scheme) == ("int4", "gptq", SCHEME.label)
        assert (record.group_size, record.damping, record.tokens) == (32, GptqSettings().damping, 64)
        assert record.rank_bound == min(64, record.shape[1])
        assert record.skipped is None
        assert record.notes == ()
        assert record.error_before is not None
        assert record.error_after is not None
        assert 0 < record.error_after < record.error_before
        assert record.sha256 == weight_sha256(found.weights[record.name])


def outputs(folder: Path, weights: dict[str, QuantizedWeight], ids: list[torch.Tensor]) -> torch.Tensor:
    """Logits of the model with these weights, [tokens, V]."""
    model = WholeModel(folder)
    with torch.no_grad():
        for name, weight in weights.items():
            model.module(name).weight.copy_(weight.dequantize(torch.float32))  # type: ignore[operator]
        return torch.cat([model.model(input_ids=window.unsqueeze(0)).logits[0] for window in ids])


def test_the_second_stream_brings_the_model_closer(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    ids = windows(8)
    before = outputs(folder, {}, ids)

    def distance(settings: GptqSettings) -> float:
        found = walk(folder, ids, settings)
        return float((outputs(folder, found.weights, ids) - before).square().mean() / before.square().mean())

    assert distance(GptqSettings()) < 0.8 * distance(ONE_STREAM) < 0.1


@pytest.mark.parametrize("settings", [GptqSettings(), ONE_STREAM], ids=["two streams", "one stream"])
def test_memory_and_batch_size_never_change_the_result(settings: GptqSettings, tmp_path: Path) -> None:
    """One pass where all windows stop together, and several with a few at a time: the same to the bit."""
    folder = tiny.tiny_llama(tmp_path / "m")
    ids = [window[: 20 + 3 * index] for index, window in enumerate(windows(5))]
    first = walk(folder, ids, settings)
    assert walk(folder, ids, settings).records == first.records
    for size in (1, 3, 99):
        other = walk(folder, ids, settings, batch_size=size, one_pass=False)
        assert other.records == first.records
        for name, weight in first.weights.items():
            assert torch.equal(weight.codes, other.weights[name].codes)
            assert torch.equal(weight.scale, other.weights[name].scale)


@pytest.mark.parametrize("way", WAYS)
def test_windows_of_different_lengths(way: str, tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path / "m")
    ids = [window[: 10 + 7 * index] for index, window in enumerate(windows(5))]
    found = walk(folder, ids, **WAYS[way])
    assert {record.tokens for record in found.records} == {sum(map(len, ids))}


@pytest.mark.parametrize("way", WAYS)
def test_layers_after_the_last_planned_block_cost_nothing(way: str, tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=3)
    found = walk(folder, windows(2), chosen=lambda layer: layer.block == 1, **WAYS[way])
    assert found.parts == ["block-00000", "block-00001"]
    assert {record.name.split(".")[2] for record in found.records} == {"1"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [1, 8])
def test_few_tokens_raise_the_damping_and_say_so(tokens: int, way: str, tmp_path: Path) -> None:
    """H03 (a)."""
    folder = tiny.tiny_llama(tmp_path / "m")
    found = walk(folder, [windows()[0][:tokens]], GptqSettings(damping=0.0), **WAYS[way])
    for record in found.records:
        assert record.algorithm == "gptq"
        assert record.damping is not None
        assert record.damping > 0
        assert record.rank_bound == tokens
        assert any("damping raised" in note for note in record.notes)
    assert all(bool(torch.isfinite(weight.scale).all()) for weight in found.weights.values())


# A weight of a block, what is written into it, and the layer that is named.
WEIGHT, INPUTS = "the weight has values that are NaN or infinite", r".*not finite \(width \d+, 192 tokens\)"
BROKEN = {
    "infinite sums in front of everything": ("0.input_layernorm.weight", 1e20, rf"0\.self_attn\.q_proj: {INPUTS}"),
    "not a number in attention": ("1.self_attn.v_proj.weight", float("nan"), rf"1\.self_attn\.v_proj: {WEIGHT}"),
    "infinite in the MLP": ("1.mlp.up_proj.weight", float("inf"), rf"1\.mlp\.up_proj: {WEIGHT}"),
    "not a number in a norm": ("1.input_layernorm.weight", float("nan"), rf"1\.self_attn\.q_proj: {INPUTS}"),
    "overflow in the middle": ("1.post_attention_layernorm.weight", 1e25, rf"1\.mlp\.gate_proj: {INPUTS}"),
    "product of two large numbers": ("1.mlp.gate_proj.weight", 1e30, rf"1\.mlp\.down_proj: {INPUTS}"),
}


@pytest.mark.parametrize("settings", [GptqSettings(), ONE_STREAM], ids=["two streams", "one stream"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_finite_stops_at_the_first_layer_that_sees_it(
    case: str, way: str, settings: GptqSettings, tmp_path: Path
) -> None:
    """H03 (b)."""
    name, value, first = BROKEN[case]
    folder = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=3)
    edit(folder, f"model.layers.{name}", lambda tensor: tensor.view(-1)[3:4].fill_(value))
    with pytest.raises(BrokenResultError, match=rf"^model\.layers\.{first}"):
        walk(folder, windows(), settings, **WAYS[way])


@pytest.mark.parametrize("settings", [GptqSettings(), ONE_STREAM], ids=["two streams", "one stream"])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, 32)], ids=lambda scheme: scheme.label)
def test_zero_rows_and_groups(scheme: Scheme, settings: GptqSettings, tmp_path: Path) -> None:
    """H04, also where the correction of earlier errors would move zeros."""
    folder = tiny.tiny_llama(tmp_path / "m")
    cleared = [f"model.layers.{block}.{path}" for block in (0, 1) for path in ("self_attn.q_proj", "mlp.down_proj")]

    def clear(tensor: torch.Tensor) -> None:
        tensor[5] = 0
        tensor[7, :32] = 0

    for name in cleared:
        edit(folder, f"{name}.weight", clear)
    found = walk(folder, windows(), settings, scheme=scheme)
    notes = {record.name: record.notes for record in found.records}
    for name in cleared:
        weight = found.weights[name]
        dense = weight.dequantize(torch.float32)
        assert bool((weight.scale > 0).all())
        assert bool(torch.isfinite(weight.scale).all())
        assert not dense[5].any()
        assert not dense[7, :32].any()
        groups = dense.shape[1] // 32
        assert notes[name] == (f"{groups + 1} groups are all zero and stay exactly zero",)


def test_dead_inputs_are_told(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    edit(folder, "model.layers.1.input_layernorm.weight", lambda tensor: tensor[4:7].fill_(0))
    found = walk(folder, windows())
    for record in found.records:
        told = "3 inputs were zero, or next to it, for every calibration token" in record.notes
        assert told == (record.name.startswith("model.layers.1.self_attn.") and not record.name.endswith("o_proj"))


@pytest.mark.parametrize("settings", [GptqSettings(), ONE_STREAM], ids=["two streams", "one stream"])
@pytest.mark.parametrize("size", [1e-12, 1e-21, 1e-22, 1e-30])
def test_tiny_inputs(size: float, settings: GptqSettings, tmp_path: Path) -> None:
    """Their squares have few digits left in float32, or none: the weights stay near the original's all the same."""
    folder = tiny.tiny_llama(tmp_path / "m")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        edit(folder, f"model.layers.1.{norm}.weight", lambda tensor: tensor.fill_(size))
    found = walk(folder, windows(), settings)
    original = open_checkpoint(folder)
    for record in found.records:
        W = original.read(f"{record.name}.weight")
        assert (found.weights[record.name].dequantize(torch.float32) - W).norm() < 0.15 * W.norm(), record.name
        assert record.error_before is not None
        assert record.error_after is not None
        if size > 1e-22 and not record.name.endswith("down_proj"):  # its inputs are squares of tiny ones
            assert 0 < record.error_after < record.error_before < 0.02, record.name


def test_a_block_whose_inputs_are_all_zero(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    edit(folder, "model.layers.1.input_layernorm.weight", lambda tensor: tensor.fill_(0))
    found = walk(folder, windows())
    original = open_checkpoint(folder)
    for name, weight in found.weights.items():
        W = original.read(f"{name}.weight")
        assert (weight.dequantize(torch.float32) - W).norm() < 0.3 * W.norm(), name


def test_settings_reach_the_engine(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    hashes = set()
    for settings in (
        GptqSettings(),
        replace(GptqSettings(), damping=0.1),
        replace(GptqSettings(), asymmetric=False),
        replace(GptqSettings(), local_search=0),
    ):
        found = walk(folder, windows(2), settings)
        hashes.add(found.records[-1].sha256)
        assert {record.damping for record in found.records} == {settings.damping}
    assert len(hashes) == 4


def nearest_all(folder: Path) -> dict[str, QuantizedWeight]:
    checkpoint = open_checkpoint(folder)
    plans = [LayerPlan(layer, SCHEME, "int4", "rtn", torch.float32) for layer in anatomy(checkpoint).layers]
    found: dict[str, QuantizedWeight] = {}
    quantize_nearest_all(checkpoint, plans, lambda _part, weights, *_more: found.update(weights), Silent(), "cpu")
    return found


def test_conv1d_is_quantized_along_its_true_inputs(tmp_path: Path) -> None:
    """H02: attention's c_proj is square, so only numbers can tell a transposition."""
    folder = tiny.tiny_gpt2(tmp_path / "m")
    found = nearest_all(folder)
    assert len(found) == 8
    checkpoint = open_checkpoint(folder)
    for layer, weight in found.items():
        dense = checkpoint.read(layer + ".weight").T
        # One scale per output row and group of 32 inputs: rows of the dense [out, in] matrix differ in scale.
        expected = dense.reshape(dense.shape[0], -1, 32).abs().amax(dim=-1) / 7
        assert weight.scale.shape == expected.shape
        assert torch.corrcoef(torch.stack([weight.scale.flatten(), expected.flatten()]))[0, 1] > 0.9
        assert (weight.dequantize(torch.float32) - dense).abs().max() <= expected.max()
