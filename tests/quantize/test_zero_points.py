"""Grids with zero points, and what every step after them makes of them."""

from __future__ import annotations

import pytest
import torch

from compress.model.blocks import Call
from compress.quantize.gptq import GptqResult, GptqSettings, gptq, prepare
from compress.quantize.grid import covering_grid, quantize_nearest, searched_grid
from compress.quantize.polish import local_search, refit_scales
from compress.quantize.refine import RefineSettings, refine
from compress.quantize.statistics import Accumulator, Statistics
from compress.scheme import PER_CHANNEL, QuantizedWeight, Scheme

W4, W8 = Scheme(4, 8, symmetric=False), Scheme(8, PER_CHANNEL, symmetric=False)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def weight(seed: int = 0, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)) + 0.3


def inputs(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(200, 32, generator=generator) @ torch.randn(32, 32, generator=generator) / 4


def statistics(X: torch.Tensor) -> Statistics:
    accumulator = Accumulator(32, "cpu")
    accumulator.add(X)
    return accumulator.mean()


def error(weight: QuantizedWeight, W: torch.Tensor, H: torch.Tensor) -> float:
    E = weight.dequantize(torch.float32) - W
    return float(((E @ H) * E).sum())


@pytest.mark.parametrize("scheme", [W4, W8, Scheme(8, 16, symmetric=False)], ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_equal_a_loop_over_every_weight(scheme: Scheme, dtype: torch.dtype) -> None:
    W, (low, high) = weight(), scheme.code_range
    grid = covering_grid(W, scheme, dtype)
    found = quantize_nearest(W, grid.scale, scheme, grid.zero_point)
    assert grid.scale.dtype == dtype
    size = 32 // scheme.groups(32)
    for o in range(6):
        for g in range(scheme.groups(32)):
            part = W[o, g * size : (g + 1) * size]
            least, most = min(float(part.min()), 0.0), max(float(part.max()), 0.0)
            assert float(grid.scale[o, g]) == pytest.approx((most - least) / (high - low), rel=2**-8)
            s = torch.tensor(float(grid.scale[o, g]))
            zero = min(max(round(float(low - torch.tensor(least) / s)), low), high)
            assert int(grid.zero_point[o, g]) == zero
            for i, w in enumerate(part):
                code = min(max(round(float(w / s)) + zero, low), high)
                assert int(found.codes[o, g * size + i]) == code


@pytest.mark.parametrize("scheme", [W4, Scheme(8, 8, symmetric=False)], ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [covering_grid, searched_grid])
def test_ranges_that_end_at_zero_and_groups_of_zeros(scheme: Scheme, dtype: torch.dtype, make) -> None:
    """H04 and H06: the zero of all positive weights is the lowest code, of all negative ones the highest."""
    W, (low, high) = weight(), scheme.code_range
    W[0, :8] = torch.arange(1, 9) / 10
    W[1, 8:16] = -torch.arange(1, 9) / 10
    W[2] = 0
    W[3, :8] = 0
    W[4, 3] = 0
    grid = make(W, scheme, dtype)
    assert int(grid.zero_point[0, 0]) == low
    assert int(grid.zero_point[1, 1]) == high
    assert grid.scale[2].tolist() == [1.0] * 4
    dense = quantize_nearest(W, grid.scale, scheme, grid.zero_point).dequantize(torch.float32)
    assert bool((dense[W == 0] == 0).all())
    assert bool(grid.scale.isfinite().all() and (grid.scale > 0).all())


def test_a_search_is_never_worse_than_the_covering_grid_and_symmetric_ones_have_no_zero_points() -> None:
    W, h = weight(3), torch.rand(32, generator=torch.Generator().manual_seed(2)) + 0.1
    plain, best = covering_grid(W, W4, torch.float32), searched_grid(W, W4, torch.float32, h)
    errors = [
        (quantize_nearest(W, grid.scale, W4, grid.zero_point).dequantize(torch.float32) - W).square() * h
        for grid in (plain, best)
    ]
    before, after = (one.reshape(6, 4, 8).sum(dim=-1) for one in errors)
    assert bool((after <= before * (1 + 1e-6)).all())
    assert float(after.sum()) < 0.95 * float(before.sum())
    assert searched_grid(W, Scheme(4, 8), torch.float32).zero_point is None


def test_gptq_beats_rounding_and_keeps_zeros() -> None:
    W, X = weight(4, rows=16), inputs()
    W[2, 8:16] = 0
    prepared = prepare(statistics(X), GptqSettings())
    result = gptq(W, prepared, W4, scale_dtype=torch.float32, settings=GptqSettings())
    H = X.T @ X / len(X)
    grid = searched_grid(W, W4, torch.float32)
    rounded = quantize_nearest(W, grid.scale, W4, grid.zero_point)
    assert error(result.weight, W, H) < 0.7 * error(rounded, W, H)
    assert bool((result.weight.dequantize(torch.float32)[2, 8:16] == 0).all())
    assert result.weight.zero_point is not None
    zeros = result.weight.zero_point.repeat_interleave(8, dim=1)
    near = (result.latent - zeros) * result.weight.scale.repeat_interleave(8, dim=1)  # W / s + z, before repairs
    assert float((near - W).norm() / W.norm()) < 0.3


def test_algorithm_1_equals_its_plainest_form() -> None:
    """One column after the other, the inverse Hessian updated by eq. (3)."""
    W, X = weight(5, rows=4), inputs(2)
    settings = GptqSettings(0.01, False, False, False, 0.5, False, 0)
    found = gptq(W, prepare(statistics(X), settings), W4, scale_dtype=torch.float32, settings=settings).weight
    H = (X.double().T @ X.double()) / len(X)
    H.diagonal().add_(0.01 * H.diagonal().mean())
    grid, inverse, rest = covering_grid(W, W4, torch.float32), torch.linalg.inv(H), W.double().clone()
    for i in range(32):
        s, z = grid.scale[:, i // 8].double(), grid.zero_point[:, i // 8].double()
        q = ((rest[:, i] / s) + z).round().clamp(-8, 7)
        assert torch.equal(found.codes[:, i], q.to(torch.int8))
        rest -= torch.outer((rest[:, i] - (q - z) * s) / inverse[i, i], inverse[i])
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]


def test_polishing_lowers_the_error_and_leaves_zero_points() -> None:
    W, X = weight(6), inputs(3)
    H = X.T @ X / len(X) + 0.01 * torch.eye(32)
    grid = covering_grid(W, W4, torch.float32)
    start = quantize_nearest(W, grid.scale, W4, grid.zero_point)
    better = local_search(W, H, start, torch.arange(32), 3)
    best = refit_scales(W, H, better)
    assert error(best, W, H) < error(better, W, H) < error(start, W, H)
    for one in (better, best):
        assert torch.equal(one.zero_point, start.zero_point)
        assert int(one.codes.min()) >= -8
        assert int(one.codes.max()) <= 7


def test_a_block_learns_with_zero_points() -> None:
    """Started from codes that are off by one in places, a block of one layer learns better ones."""
    torch.manual_seed(0)
    W, X = weight(7, rows=32), [torch.randn(1, 24, 32) for _ in range(48)]
    W[3, :8] = 0
    block = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    grid = covering_grid(W, W4, torch.float32)
    s, z = (one.repeat_interleave(8, dim=1) for one in (grid.scale, grid.zero_point))
    latent = torch.where(W == 0, z, W / s + z + torch.randn(32, 32) / 3)
    good = QuantizedWeight(latent.round().clamp(-8, 7).to(torch.int8), grid.scale, grid.zero_point, W4)
    start = GptqResult(good, latent, W, None)
    targets = [x @ W.T for x in X]
    calls = [Call((), {})] * len(X)
    learnt = refine(block, {"0": (start, False)}, X, calls, targets, RefineSettings(60, 0, 0.02, 0.001))
    assert learnt.weights is not None
    assert learnt.error_after < learnt.error_before
    assert torch.equal(learnt.weights["0"].zero_point, good.zero_point)
    assert bool((learnt.weights["0"].dequantize(torch.float32)[3, :8] == 0).all())
