"""Rounding to 8-bit floating-point numbers, 4 bits of exponent and 3 of mantissa (e4m3, no infinities).

Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1: the largest number is 448.
"""

from __future__ import annotations

import torch

from compress.quantize.grid import stored_scale
from compress.scheme import QuantizedWeight, Scheme

CODES = torch.float8_e4m3fn


def quantize_float8(W: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
    """Round to nearest, ties to even, on the scale max|W| / 448 of each output channel; a row of zeros gets scale 1.

    Args:
        W: float32 [out, in].
        dtype: dtype the scale is stored in.
    """
    largest = torch.finfo(CODES).max
    scale = stored_scale(W.abs().amax(dim=1, keepdim=True) / largest, dtype)  # [out, 1]
    # A scale that was rounded down leaves the largest weight above 448, where the cast would give NaN.
    codes = (W / scale.float()).clamp_(-largest, largest).to(CODES)
    return QuantizedWeight(codes, scale, None, scheme)
