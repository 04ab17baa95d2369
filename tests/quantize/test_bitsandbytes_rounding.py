"""The roundings of bitsandbytes against the library itself."""

from __future__ import annotations

import bitsandbytes.functional as library
import pytest
import torch

from compress.errors import BrokenResultError
from compress.quantize.bitsandbytes_rounding import check_half, quantize_llm_int8, quantize_nf4
from compress.scheme import NF4_LEVELS, PER_CHANNEL, Scheme

NF4 = Scheme(4, 64, values="nf4")
LLM_INT8 = Scheme(8, PER_CHANNEL, activation_bits=8, values="llm_int8")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Rows of many magnitudes, with ties between levels, and with numbers that float16 holds as subnormal ones."""
    W = torch.randn(48, 192, generator=torch.Generator().manual_seed(seed))
    W *= torch.logspace(-6, 3, 48).unsqueeze(1)
    levels = torch.tensor(NF4_LEVELS)
    W[3, :15] = (levels[1:] + levels[:-1]) / 2
    W[3, 15] = 1.0
    W[4, :64] = torch.arange(64) - 31.5
    return W.to(dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    flat = codes.reshape(-1).to(torch.uint8)
    return ((flat[::2] << 4) | flat[1::2]).unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_is_what_the_library_makes(dtype: torch.dtype) -> None:
    W = weight(dtype)
    codes, state = library.quantize_4bit(W, blocksize=64, compress_statistics=False, quant_type="nf4")
    ours = quantize_nf4(W.float(), NF4)
    assert torch.equal(packed(ours.codes), codes)
    assert torch.equal(ours.scale.reshape(-1), state.absmax)
    state.dtype = torch.float32
    assert torch.equal(ours.dequantize(torch.float32), library.dequantize_4bit(codes, state))


@pytest.mark.parametrize("dtype", DTYPES)
def test_llm_int8_is_what_the_library_makes(dtype: torch.dtype) -> None:
    W = weight(dtype)
    codes, scale, _ = library.int8_vectorwise_quant(W.to(torch.float16))
    ours = quantize_llm_int8(W.float(), LLM_INT8)
    assert torch.equal(ours.codes, codes)
    assert torch.equal(ours.scale.reshape(-1), scale)
    assert torch.equal(ours.dequantize(torch.float32), library.int8_vectorwise_dequant(codes, scale))


def test_zeros_stay_zero_on_a_positive_scale() -> None:
    """H04: the library stores a scale of 0; ours is 1, and what it stands for is the same."""
    W = weight(torch.float32)
    W[5] = 0
    W[7, 64:128] = 0
    four, eight = quantize_nf4(W, NF4), quantize_llm_int8(W, LLM_INT8)
    assert four.scale[5].tolist() == [1, 1, 1]
    assert float(four.scale[7, 1]) == 1
    assert float(eight.scale[5]) == 1
    for quantized in (four, eight):
        assert (quantized.scale > 0).all()
        dense = quantized.dequantize(torch.float32)
        assert not dense[5].any()
        assert not dense[7, 64:128].any()


def test_weights_beyond_float16_are_told_with_their_layer() -> None:
    W = torch.ones(4, 8)
    check_half("model.layers.0.mlp.up_proj", W)
    W[2, 3] = -7e4
    with pytest.raises(BrokenResultError, match=r"model.layers.0.mlp.up_proj: .*7e\+04 is too large"):
        check_half("model.layers.0.mlp.up_proj", W)
