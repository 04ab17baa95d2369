"""Learning a block: what it keeps, what it drops, what it never moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from walking import WholeModel, edit, walk, windows

from compress.model.blocks import Call
from compress.quantize.gptq import GptqResult
from compress.quantize.refine import RefineSettings, held_out, refine
from compress.scheme import QuantizedWeight, Scheme

LEARNING = RefineSettings(steps=20)


def rounded(W: torch.Tensor) -> GptqResult:
    """W [out, in] in one group, rounded to nearest."""
    scale = W.abs().amax(dim=1, keepdim=True) / 7
    latent = torch.where(scale > 0, W / scale, 0.0)
    scale = torch.where(scale > 0, scale, 1.0)
    weight = QuantizedWeight(latent.round().to(torch.int8), scale, None, Scheme(4, W.shape[1]))
    return GptqResult(weight, latent, W, 0.01)


class Block(torch.nn.Module):
    def __init__(self, W: torch.Tensor) -> None:
        super().__init__()
        self.up = torch.nn.Linear(W.shape[1], W.shape[0], bias=False)
        self.up.weight.data = W

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.up(states).relu()


@pytest.mark.parametrize(("count", "expected"), [(2, 1), (16, 1), (33, 2), (128, 8)])
def test_held_out(count: int, expected: int) -> None:
    assert held_out(count) == expected


def test_it_brings_a_block_closer_and_says_so(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=1)
    ids = windows(20, 48)
    plain, learnt = (walk(folder, ids, refine=settings) for settings in (RefineSettings(), LEARNING))
    assert [one.name for one in learnt.records] == [one.name for one in plain.records]
    assert learnt.parts == plain.parts
    (note,) = {note for one in learnt.records for note in one.notes}
    assert note.startswith("refined: the block's relative error on held-out windows ")
    before, after = (float(figure) for figure in note.rpartition(" windows ")[2].split(" -> "))
    assert after < before
    original, quantized = WholeModel(folder), WholeModel(folder)
    with torch.no_grad():
        for name, weight in learnt.weights.items():
            quantized.module(name).weight.copy_(weight.dequantize(torch.float32))  # type: ignore[operator]
    wanted, found = (model.inputs("model.norm", ids[-1:]) for model in (original, quantized))
    assert after == pytest.approx(float((found - wanted).square().sum() / wanted.square().sum()), rel=1e-3)


def test_twice_the_same_and_another_with_another_seed(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=1)
    ids = windows(12, 24)
    found = [walk(folder, ids, refine=RefineSettings(12, seed, 0.01)).records for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_groups_of_zeros_stay_zero(tmp_path: Path) -> None:
    """Rates that move every other code."""
    folder = tiny.tiny_llama(tmp_path / "m")
    name = "model.layers.0.mlp.up_proj"

    def clear(tensor: torch.Tensor) -> None:
        tensor[5] = 0
        tensor[7, :32] = 0

    edit(folder, f"{name}.weight", clear)
    found = walk(folder, windows(5, 24), refine=RefineSettings(8, rounding_rate=0.2, scale_rate=0.05))
    dense = found.weights[name].dequantize(torch.float32)
    assert not dense[5].any()
    assert not dense[7, :32].any()
    assert dense[7, 32:].any()


def test_only_zeros_are_frozen_and_what_is_worse_is_dropped() -> None:
    generator = torch.Generator().manual_seed(3)
    W = torch.randn(6, 16, generator=generator)
    W[3] = 0
    mix = torch.randn(16, 16, generator=generator)  # nearest is best where inputs are not correlated
    inputs = [torch.randn(1, 32, 16, generator=generator) @ mix for _ in range(40)]
    block = Block(W)
    targets = [block(states).detach() for states in inputs]
    results = {"up": (rounded(W), False)}
    start = rounded(W).weight

    def learnt(**rates: float) -> tuple[QuantizedWeight | None, float, float]:
        calls = [Call((), {})] * len(inputs)
        found = refine(block, results, inputs, calls, targets, RefineSettings(20, **rates))
        return (None if found.weights is None else found.weights["up"]), found.error_before, found.error_after

    weight, before, after = learnt(rounding_rate=0.003)
    assert weight is not None
    assert after < before
    assert not weight.codes[3].any()
    assert not torch.equal(weight.codes, start.codes)
    dropped, before, after = learnt(rounding_rate=3.0, scale_rate=0.5)
    assert dropped is None
    assert not after < before
    kept = results["up"][0].weight
    assert torch.equal(kept.codes, start.codes)
    assert torch.equal(kept.scale, start.scale), "what was dropped must not have moved the scales, float32 ones either"
