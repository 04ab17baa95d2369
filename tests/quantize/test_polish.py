"""Refitted scales and coordinate descent against dense solutions and brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.linalg import lstsq

from compress.quantize.grid import max_abs_scale, quantize_nearest, search_scale
from compress.quantize.polish import local_search, refit_scales
from compress.scheme import PER_CHANNEL, QuantizedWeight, Scheme

SCHEMES = [Scheme(4, 8), Scheme(4, PER_CHANNEL), Scheme(8, 16)]


def problem(
    out: int = 6, width: int = 32, scheme: Scheme = SCHEMES[0], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, QuantizedWeight]:
    """W [out, in], a damped H [in, in] of correlated inputs, and W rounded to nearest."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(4 * width, width, generator=generator) @ torch.randn(width, width, generator=generator)
    H = X.T @ X / len(X)
    H.diagonal().add_(0.01 * H.diagonal().mean())
    W = torch.randn(out, width, generator=generator)
    return W, H, quantize_nearest(W, max_abs_scale(W, scheme, torch.float32), scheme)


def row_errors(W: torch.Tensor, H: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """E H E^T of every row, float64 [out]."""
    E = weight.dequantize(torch.float32).double() - W.double()
    return ((E @ H.double()) * E).sum(dim=1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_refit_is_the_least_squares_solution(scheme: Scheme) -> None:
    W, H, weight = problem(scheme=scheme)
    found = refit_scales(W, H, weight)
    assert torch.equal(found.codes, weight.codes)
    groups = weight.scale.shape[1]
    root = torch.linalg.cholesky(H.double()).T  # H = root^T root
    for row in range(len(W)):
        columns = torch.zeros(W.shape[1], groups, dtype=torch.float64)
        for k, part in enumerate(weight.codes[row].double().reshape(groups, -1)):
            columns[k * len(part) : (k + 1) * len(part), k] = part
        expected, *_ = lstsq((root @ columns).numpy(), (root @ W[row].double()).numpy())
        torch.testing.assert_close(found.scale[row].double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_neither_step_ever_raises_the_error_of_a_row(scheme: Scheme, dtype: torch.dtype) -> None:
    for seed in range(4):
        W, H, _ = problem(scheme=scheme, seed=seed)
        weight = quantize_nearest(W, search_scale(W, scheme, dtype), scheme)
        order = H.diagonal().argsort(descending=True)
        for step in (
            lambda weight, W=W, H=H: refit_scales(W, H, weight),
            lambda weight, W=W, H=H, order=order: local_search(W, H, weight, order, 2),
        ):
            before, weight = row_errors(W, H, weight), step(weight)
            assert weight.scale.dtype == dtype
            assert bool((row_errors(W, H, weight) <= before * (1 + 1e-5)).all())


def test_a_group_without_codes_keeps_its_scale() -> None:
    W, H, weight = problem()
    codes = weight.codes.clone()
    codes[2] = 0
    codes[3, :8] = 0
    found = refit_scales(W, H, replace(weight, codes=codes))
    assert torch.equal(found.scale[2], weight.scale[2])
    assert found.scale[3, 0] == weight.scale[3, 0]
    assert bool(torch.isfinite(found.scale).all())
    assert bool((found.scale > 0).all())


def test_a_scale_that_would_turn_or_run_away_stays() -> None:
    W, H, weight = problem()
    codes, scale = weight.codes.clone(), weight.scale.clone()
    codes[1, :8] *= -1
    scale[2, 3] *= 50
    found = refit_scales(W, H, replace(weight, codes=codes, scale=scale))
    assert bool((found.scale > 0).all())
    assert found.scale[1, 0] == scale[1, 0]
    assert found.scale[2, 3] == scale[2, 3]
    assert not torch.equal(found.scale[0], scale[0])


def slow_pass(W: torch.Tensor, H: torch.Tensor, weight: QuantizedWeight, order: torch.Tensor) -> torch.Tensor:
    """Every code of every column in turn, by trying all values, float64."""
    low, high = weight.scheme.code_range
    values = torch.arange(low, high + 1, dtype=torch.float64)
    s = weight.scale.double().repeat_interleave(W.shape[1] // weight.scale.shape[1], dim=1)
    codes = weight.codes.double().clone()
    for column in order.tolist():
        for row in range(len(W)):
            tried = codes[row].repeat(len(values), 1)
            tried[:, column] = values
            E = tried * s[row] - W[row].double()
            codes[row, column] = values[((E @ H.double()) * E).sum(dim=1).argmin()]
    return codes.to(torch.int8)


@pytest.mark.parametrize("width", [32, 96])  # 96 crosses the border of one lazily updated block of columns
def test_a_pass_takes_the_best_value_of_every_code_in_turn(width: int) -> None:
    W, H, weight = problem(out=3, width=width)
    order = H.diagonal().argsort(descending=True)
    found = local_search(W, H, weight, order, 1)
    assert torch.equal(found.scale, weight.scale)
    assert (found.codes == slow_pass(W, H, weight, order)).float().mean() > 0.97
    assert not torch.equal(found.codes, weight.codes)


def test_at_the_end_no_single_code_can_be_better() -> None:
    W, H, weight = problem(out=3)
    order = torch.arange(32)
    found = local_search(W, H, weight, order, 100)
    assert torch.equal(local_search(W, H, found, order, 1).codes, found.codes)
    least = row_errors(W, H, found)
    low, high = weight.scheme.code_range
    for column in range(32):
        for value in range(low, high + 1):
            codes = found.codes.clone()
            codes[:, column] = value
            assert bool((row_errors(W, H, replace(found, codes=codes)) >= least * (1 - 1e-5)).all())


def test_no_pass_changes_nothing() -> None:
    W, H, weight = problem()
    assert local_search(W, H, weight, torch.arange(32), 0) is weight


def test_arguments_are_not_changed() -> None:
    W, H, weight = problem()
    kept = [one.clone() for one in (W, H, weight.codes, weight.scale)]
    local_search(W, H, weight, torch.arange(32), 2)
    refit_scales(W, H, weight)
    assert all(torch.equal(*pair) for pair in zip(kept, (W, H, weight.codes, weight.scale), strict=True))
