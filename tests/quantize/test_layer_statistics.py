"""Sums over tokens against the products they stand for, in float64."""

from __future__ import annotations

import pytest
import torch

from compress.quantize.statistics import Accumulator, Statistics

LENGTHS = (5, 1, 12)


def windows(width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """[1, T, width] of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, width, generator=generator).to(dtype) for length in LENGTHS]


def together(parts: list[torch.Tensor]) -> torch.Tensor:
    """All tokens, float64 [T, width]."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).double()


def collected(
    inputs: list[torch.Tensor],
    original: list[torch.Tensor] | None = None,
    residual: list[torch.Tensor] | None = None,
) -> Statistics:
    accumulator = Accumulator(inputs[0].shape[-1], "cpu")
    for index, x in enumerate(inputs):
        accumulator.add(x, None if original is None else original[index], None if residual is None else residual[index])
    return accumulator.mean()


def test_means_equal_plain_products() -> None:
    x, y, r = windows(7), windows(7, seed=1), windows(3, seed=2)
    found = collected(x, y, r)
    X, Y, R = together(x), together(y), together(r)
    assert found.tokens == sum(LENGTHS)
    assert found.input_drift is not None
    assert found.residual_drift is not None
    expected = (X.T @ X, (Y - X).T @ X, R.T @ X)
    for one, product in zip((found.H, found.input_drift, found.residual_drift), expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), product / len(X), rtol=1e-5, atol=1e-6)
    assert torch.equal(found.H, found.H.T), "one triangle is a copy of the other"


def test_without_a_second_stream_there_is_no_drift() -> None:
    found = collected(windows(7))
    assert found.input_drift is None
    assert found.residual_drift is None
    same = collected(windows(7), windows(7))
    assert same.input_drift is not None
    assert not same.input_drift.any()
    assert torch.equal(same.H, found.H)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_do_not_lose_what_the_dtype_of_the_model_cannot_hold(dtype: torch.dtype) -> None:
    x = [torch.full((1, 600, 2), 1.0, dtype=dtype) for _ in range(8)]
    assert torch.equal(collected(x).H, torch.ones(2, 2))
    large = [torch.full((1, 600, 2), 100.0, dtype=dtype)]
    found = collected(large, [torch.full((1, 600, 2), 104.0, dtype=dtype)], large)
    assert found.input_drift is not None
    assert found.residual_drift is not None
    torch.testing.assert_close(found.input_drift, torch.full((2, 2), 400.0), rtol=0.01, atol=0)
    torch.testing.assert_close(found.residual_drift, torch.full((2, 2), 1e4), rtol=0.01, atol=0)


def test_inputs_are_not_changed_and_may_be_slices() -> None:
    whole = torch.randn(1, 9, 14, generator=torch.Generator().manual_seed(3))
    slices = whole[..., ::2]
    before = whole.clone()
    found = collected([slices], [slices + 1])
    X = slices.reshape(-1, 7).double()
    torch.testing.assert_close(found.H.double(), X.T @ X / 9, rtol=1e-5, atol=1e-6)
    assert torch.equal(whole, before)


def test_the_same_windows_give_the_same_bits() -> None:
    first, second = (collected(windows(64), windows(64, seed=1), windows(8, seed=2)) for _ in range(2))
    for name in ("H", "input_drift", "residual_drift"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_no_tokens_give_zeros() -> None:
    found = Accumulator(4, "cpu").mean()
    assert found.tokens == 0
    assert torch.equal(found.H, torch.zeros(4, 4))
