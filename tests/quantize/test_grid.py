"""Scales and rounding against loops that say the same thing slowly."""

from __future__ import annotations

import pytest
import torch

from compress.quantize.grid import (
    LARGEST_RATIO,
    RATIOS,
    SMALLEST_RATIO,
    max_abs_scale,
    output_error,
    quantize_nearest,
    search_scale,
    to_codes,
)
from compress.scheme import PER_CHANNEL, Scheme

SCHEMES = [Scheme(4, 8), Scheme(4, PER_CHANNEL), Scheme(8, 16), Scheme(8, PER_CHANNEL)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))


def slow_codes(W: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> list[list[int]]:
    low, high = scheme.code_range
    size = W.shape[1] // scale.shape[1]
    rows = []
    for o in range(W.shape[0]):
        row = []
        for i in range(W.shape[1]):
            exact = torch.tensor(float(W[o, i])) / torch.tensor(float(scale[o, i // size]))
            row.append(min(max(round(float(exact)), low), high))  # Python rounds half to even, as torch does
        rows.append(row)
    return rows


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_equal_a_loop_over_every_weight(scheme: Scheme, dtype: torch.dtype) -> None:
    W = weight()
    scale = max_abs_scale(W, scheme, dtype)
    assert scale.dtype == dtype
    assert scale.shape == (6, scheme.groups(32))
    assert to_codes(W, scale, scheme).tolist() == slow_codes(W, scale, scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_search_finds_the_best_ratio_of_the_list(scheme: Scheme) -> None:
    W = weight(1)
    h = torch.rand(32, generator=torch.Generator().manual_seed(2)) + 0.1
    scale = search_scale(W, scheme, torch.float32, h)
    low, high = scheme.code_range
    size = 32 // scheme.groups(32)
    for o in range(W.shape[0]):
        for g in range(scheme.groups(32)):
            part, hp = W[o, g * size : (g + 1) * size], h[g * size : (g + 1) * size]
            largest = part.abs().max() / high
            errors = []
            for ratio in torch.linspace(SMALLEST_RATIO, LARGEST_RATIO, RATIOS).tolist():
                s = largest * ratio
                q = (part / s).round().clamp(low, high)
                errors.append(float((hp * (part - q * s) ** 2).sum()))
            s = scale[o, g]
            q = (part / s).round().clamp(low, high)
            assert float((hp * (part - q * s) ** 2).sum()) == pytest.approx(min(errors), rel=1e-5)


def test_search_is_no_worse_than_max_abs() -> None:
    W, scheme = weight(3), Scheme(4, 8)
    searched = quantize_nearest(W, search_scale(W, scheme, torch.float32), scheme)
    plain = quantize_nearest(W, max_abs_scale(W, scheme, torch.float32), scheme)
    assert output_error(W, searched.dequantize(torch.float32), None) <= output_error(
        W, plain.dequantize(torch.float32), None
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_and_groups_stay_exactly_zero(scheme: Scheme, dtype: torch.dtype) -> None:
    """H04: max-abs 0 must not become a scale of 0, and 0 must not become NaN."""
    W = weight(4)
    W[2] = 0
    W[4, :16] = 0
    for h in (None, torch.ones(32), torch.cat([torch.zeros(16), torch.ones(16)])):
        scale = search_scale(W, scheme, dtype, h)
        dense = quantize_nearest(W, scale, scheme).dequantize(torch.float32)
        assert bool((scale > 0).all())
        assert bool(torch.isfinite(scale).all())
        assert bool((dense[2] == 0).all())
        assert bool((dense[4, :16] == 0).all())
        assert bool(torch.isfinite(dense).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1e6, 1e30])
def test_scales_of_extreme_weights_stay_finite_and_positive(dtype: torch.dtype, magnitude: float) -> None:
    scale = search_scale(weight(5) * magnitude, Scheme(4, 8), dtype)
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())


def test_all_positive_and_all_negative_groups() -> None:
    W = torch.stack([torch.linspace(0.1, 3.2, 32), -torch.linspace(0.1, 3.2, 32)])
    scheme = Scheme(8, PER_CHANNEL)
    dense = quantize_nearest(W, search_scale(W, scheme, torch.float32), scheme).dequantize(torch.float32)
    assert float((dense - W).abs().max()) <= 2 * 3.2 / 127


def test_output_error_is_the_relative_error_of_the_outputs() -> None:
    X = torch.randn(50, 32)
    W = weight(6)
    Q = W + 0.05 * weight(7)
    direct = ((W - Q) @ X.T).square().sum() / (W @ X.T).square().sum()
    assert output_error(W, Q, X.T @ X) == pytest.approx(float(direct), rel=1e-4)
    assert output_error(torch.zeros(2, 4), torch.zeros(2, 4), None) == 0.0


@pytest.mark.parametrize("power", [-120, -30, 30, 118])
def test_output_error_knows_no_unit(power: int) -> None:
    """Products with squares of very small or large inputs would underflow or overflow."""
    X, W = torch.randn(50, 32), weight(6)
    Q, H = W + 1e-3 * weight(7), X.T @ X
    assert output_error(W, Q, H * 2.0**power) == output_error(W, Q, H)
