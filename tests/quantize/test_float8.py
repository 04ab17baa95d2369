"""Rounding to 8-bit floating-point numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from compress.journal import Journal
from compress.quantize.float8 import quantize_float8
from compress.scheme import PER_CHANNEL, Scheme

FP8 = Scheme(8, PER_CHANNEL, activation_bits=8, values="float")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def weight(seed: int = 0) -> torch.Tensor:
    W = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
    W[2] = 0
    W[3, 5] = 30.0
    return W


def all_numbers() -> list[float]:
    """Every number of e4m3, by its definition: sign, exponent with bias 7, mantissa of 3 bits; 1111.111 is NaN."""
    found = set()
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):
                power = max(exponent, 1) - 7
                found.add(math.ldexp(mantissa / 8 + (exponent > 0), power))
    return sorted({sign * number for number in found for sign in (1, -1)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_a_nearest_number(dtype: torch.dtype) -> None:
    W = weight()
    quantized = quantize_float8(W, FP8, dtype)
    numbers = torch.tensor(all_numbers())
    assert len(numbers) == 253
    assert quantized.scale.dtype == dtype
    assert quantized.codes.dtype == torch.float8_e4m3fn
    exact = W / quantized.scale.float()
    wrong = (quantized.codes.float() - exact).abs()
    nearest = (exact.unsqueeze(-1) - numbers).abs().amin(-1)
    assert torch.equal(wrong, nearest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_weight_of_a_row_is_448_and_zeros_stay_zero(dtype: torch.dtype) -> None:
    quantized = quantize_float8(weight(), FP8, dtype)
    largest = quantized.codes.float().abs().amax(dim=1)
    assert largest.tolist() == [448, 448, 0, 448, 448, 448]
    assert float(quantized.scale[2]) == 1
    assert not quantized.dequantize(torch.float32)[2].any()


def test_ties_go_to_the_even_mantissa() -> None:
    """With a scale of 1: between 16 (mantissa 0) and 18 (mantissa 1) lies 17, between 18 and 20 lies 19."""
    W = torch.tensor([[448.0, 17.0, 19.0, -17.0, -19.0]])
    assert quantize_float8(W, FP8, torch.float32).codes.float().tolist() == [[448.0, 16.0, 20.0, -16.0, -20.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_becomes_nan(dtype: torch.dtype) -> None:
    """A cast of more than 464 gives NaN: scales that round down, or that a dtype cannot hold, must not lead there."""
    W = torch.logspace(-30, 30, 4096).reshape(64, 64)
    quantized = quantize_float8(torch.cat([W, -W]), FP8, dtype)
    assert quantized.codes.float().isfinite().all()
    assert quantized.scale.isfinite().all()
    assert (quantized.scale > 0).all()


def test_a_code_is_no_integer_in_a_range() -> None:
    with pytest.raises(ValueError, match="no range of integers"):
        _ = FP8.code_range


def test_a_journal_gives_the_codes_back(tmp_path: Path) -> None:
    weights = {"fc": quantize_float8(weight(), FP8, torch.bfloat16)}
    journal = Journal.start(tmp_path, {})
    journal.save("fc", weights, [])
    found = Journal.reopen(tmp_path, {}).load("fc")
    assert found.scheme == FP8
    assert torch.equal(found.codes.view(torch.uint8), weights["fc"].codes.view(torch.uint8))
    assert torch.equal(found.scale, weights["fc"].scale)
