"""GPTQ against the slowest form of its definition: one weight at a time, a fresh inverse after every column."""

from __future__ import annotations

import pytest
import torch

from compress.quantize.gptq import factor, gptq, sweep
from compress.quantize.grid import output_error, quantize_nearest, search_scale
from compress.scheme import PER_CHANNEL, Scheme


def layer(out: int = 8, width: int = 32, tokens: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """W [out, in] and H [in, in] of inputs that are correlated, so that repairing pays."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator)
    X = torch.randn(tokens, width, generator=generator) @ mix
    return torch.randn(out, width, generator=generator), X.T @ X / tokens


def slow_gptq(W: torch.Tensor, H: torch.Tensor, s: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Eq. (2) and (3) as they stand, float64: after each column the inverse of the remaining Hessian is taken anew."""
    W, H, s = W.double().clone(), H.double(), s.double()
    low, high = scheme.code_range
    codes = torch.zeros(W.shape, dtype=torch.int8)
    for i in range(W.shape[1]):
        Hinv = torch.linalg.inv(H[i:, i:])
        q = (W[:, i] / s[:, i]).round().clamp(low, high)
        codes[:, i] = q.to(torch.int8)
        error = (W[:, i] - q * s[:, i]) / Hinv[0, 0]
        W[:, i:] -= error.unsqueeze(1) * Hinv[0].unsqueeze(0)
    return codes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [32, 160])  # 160 crosses the border of one lazily updated block of columns
def test_sweep_equals_the_definition(bits: int, width: int) -> None:
    W, H = layer(width=width, tokens=4 * width)
    scheme = Scheme(bits, 16)
    H = H + 0.01 * H.diagonal().mean() * torch.eye(width)
    s = search_scale(W, scheme, torch.float32).repeat_interleave(16, dim=1)
    factored = factor(H, torch.zeros(width, dtype=torch.bool), 0.0)
    assert factored is not None
    fast = sweep(W.clone(), factored[0], s, scheme)
    slow = slow_gptq(W, H, s, scheme)
    # float32 against float64: a value within rounding noise of a tie may fall to the other side and move its
    # successors, so the error is compared as well as the codes.
    assert (fast == slow).float().mean() > 0.97
    assert output_error(W, fast * s, H) == pytest.approx(output_error(W, slow * s, H), rel=0.02)


@pytest.mark.parametrize("scheme", [Scheme(4, 8), Scheme(4, PER_CHANNEL), Scheme(8, 16)], ids=lambda s: s.label)
def test_beats_rounding_on_the_same_scales(scheme: Scheme) -> None:
    W, H = layer()
    result = gptq(W, H, scheme, scale_dtype=torch.float32, damping=0.01)
    nearest = quantize_nearest(W, result.weight.scale, scheme)
    assert output_error(W, result.weight.dequantize(torch.float32), H) < 0.8 * output_error(
        W, nearest.dequantize(torch.float32), H
    )
    assert result.damping == 0.01
    assert result.dead_columns == 0


def test_codes_and_scales_are_in_natural_order() -> None:
    """Activation order must not leak: with a diagonal H nothing is repaired, so GPTQ is round-to-nearest."""
    W, _ = layer()
    H = torch.diag(torch.rand(32) + 0.1)
    scheme = Scheme(4, 8)
    result = gptq(W, H, scheme, scale_dtype=torch.float16, damping=0.0)
    nearest = quantize_nearest(W, search_scale(W, scheme, torch.float16, H.diagonal()), scheme)
    assert torch.equal(result.weight.codes, nearest.codes)
    assert torch.equal(result.weight.scale, nearest.scale)


def test_dead_columns_are_rounded_and_disturb_nothing() -> None:
    W, H = layer()
    H[5] = 0
    H[:, 5] = 0
    scheme = Scheme(4, 8)
    result = gptq(W, H, scheme, scale_dtype=torch.float32, damping=0.01)
    nearest = quantize_nearest(W, result.weight.scale, scheme)
    assert result.dead_columns == 1
    assert torch.equal(result.weight.codes[:, 5], nearest.codes[:, 5])


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_singular_hessian_raises_the_damping(tokens: int, damping: float) -> None:
    """H03 (a): rank at most `tokens`, far under the width."""
    W, H = layer(width=64, tokens=tokens)
    result = gptq(W, H, Scheme(4, 32), scale_dtype=torch.float32, damping=damping)
    assert result.damping is not None
    assert result.damping > 0
    assert bool(torch.isfinite(result.weight.dequantize(torch.float32)).all())


def test_all_dead_is_round_to_nearest() -> None:
    W, _ = layer()
    scheme = Scheme(4, 8)
    result = gptq(W, torch.zeros(32, 32), scheme, scale_dtype=torch.float32, damping=0.01)
    assert torch.equal(result.weight.codes, quantize_nearest(W, result.weight.scale, scheme).codes)


def test_inputs_are_not_changed() -> None:
    W, H = layer()
    before = W.clone(), H.clone()
    gptq(W, H, Scheme(4, 8), scale_dtype=torch.float32, damping=0.01)
    assert torch.equal(W, before[0])
    assert torch.equal(H, before[1])
