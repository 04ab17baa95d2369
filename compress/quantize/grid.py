"""Scales and rounding: the integer grid under every method.

Letters: W weight [out, in]; s scale [out, groups]; q codes [out, in]; h weight of a column's error [in].
A group is `group_size` neighbouring input columns of one output row.

Symmetric b-bit codes are -2^(b-1) .. 2^(b-1)-1 around zero, and scales are positive. Every scale is rounded to the
dtype it will be stored in before a code is chosen, so that what is evaluated is what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from compress.scheme import QuantizedWeight, Scheme

# Clip ratios tried per group, as shares of the scale that covers the largest weight. Below 0.4 none ever wins at
# 4 bits; a little above 1 pays for groups whose values fall badly between grid points.
SMALLEST_FLOAT16 = 2.0**-24
SMALLEST_RATIO, LARGEST_RATIO, RATIOS = 0.40, 1.05, 45


def max_abs_scale(W: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """The scale with which the largest weight of each group is just representable: max|W| / (2^(b-1) - 1).

    A group of zeros gets scale 1: its codes are zero, and zero times a harmless number stays exactly zero.

    Args:
        W: float32 [out, in].
        dtype: dtype the scale is stored in; the result has it.

    Returns:
        scale [out, groups], finite and positive.
    """
    out, width = W.shape
    largest = W.reshape(out, scheme.groups(width), -1).abs().amax(dim=-1)  # [out, groups]
    return stored_scale(largest / scheme.code_range[1], dtype)


def stored_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds scales to `dtype`; zero becomes 1, and what would round to zero the smallest positive number kept.

    float16 keeps its subnormal numbers: without them all weights under 4e-4 would share one scale. The other
    dtypes reach so far down that their subnormals, which some kernels flush to zero, are not needed.
    """
    limits = torch.finfo(dtype)
    smallest = SMALLEST_FLOAT16 if dtype == torch.float16 else limits.tiny
    rounded = scale.clamp(max=limits.max).to(dtype)
    rounded = torch.where(rounded < smallest, torch.full_like(rounded, smallest), rounded)
    return torch.where(scale == 0, torch.ones_like(rounded), rounded)


def to_codes(W: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Round to nearest: q = clamp(round(W / s)), int8 [out, in]."""
    low, high = scheme.code_range
    out, width = W.shape
    grouped = W.reshape(out, scale.shape[1], -1) / scale.float().unsqueeze(-1)
    return grouped.round_().clamp_(low, high).to(torch.int8).reshape(out, width)


def search_scale(
    W: torch.Tensor, scheme: Scheme, dtype: torch.dtype, h: torch.Tensor | None = None, power: float = 2.0
) -> torch.Tensor:
    """The scale per group with the least weighted rounding error: argmin_s sum_i h_i |W_i - s q_i(s)|^power.

    With h the diagonal of the Hessian X^T X and power 2 this is the error of the layer's output if the columns
    were independent. Groups without any weight (dead inputs) fall back to equal weights.

    Args:
        W: float32 [out, in].
        h: float32 [in], not negative; None for equal weights.

    Returns:
        scale [out, groups] in `dtype`.
    """
    out, width = W.shape
    groups = scheme.groups(width)
    low, high = scheme.code_range
    grouped = W.reshape(out, groups, -1)
    weights = _column_weights(h, groups, width, W)
    start = max_abs_scale(W, scheme, torch.float32)
    best = stored_scale(start, dtype)
    best_error = torch.full((out, groups), float("inf"), device=W.device)
    for ratio in torch.linspace(SMALLEST_RATIO, LARGEST_RATIO, RATIOS).tolist():
        candidate = stored_scale(start * ratio, dtype)
        s = candidate.float().unsqueeze(-1)
        error = (grouped / s).round_().clamp_(low, high).mul_(s).sub_(grouped).abs_()
        error = (error.square_() if power == 2.0 else error.pow_(power)).mul_(weights).sum(dim=-1)
        better = error < best_error
        best = torch.where(better, candidate, best)
        best_error = torch.where(better, error, best_error)
    return torch.where((grouped == 0).all(dim=-1), stored_scale(start, dtype), best)


def _column_weights(h: torch.Tensor | None, groups: int, width: int, W: torch.Tensor) -> torch.Tensor:
    if h is None:
        return torch.ones(1, 1, 1, device=W.device)
    weights = h.float().reshape(groups, width // groups)
    dead = weights.sum(dim=-1, keepdim=True) == 0
    return torch.where(dead, torch.ones_like(weights), weights).unsqueeze(0)


def quantize_nearest(W: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> QuantizedWeight:
    """Round to nearest on given scales."""
    return QuantizedWeight(to_codes(W, scale, scheme), scale, None, scheme)


def output_error(W: torch.Tensor, quantized: torch.Tensor, H: torch.Tensor | None) -> float:
    """Relative error of the layer's output: tr(D H D^T) / tr(W H W^T), D = W - quantized; H None is the identity.

    Returns 0 for a weight whose outputs are all zero.
    """
    return output_errors(W, [quantized], H)[0]


def output_errors(W: torch.Tensor, several: Sequence[torch.Tensor], H: torch.Tensor | None) -> list[float]:
    """`output_error` of several weights that stand for W."""
    if H is not None:
        # a power of two changes no digit, and products with the squares of tiny inputs do not underflow
        unit = 2.0 ** -(math.frexp(float(H.diagonal().amax()))[1] // 2)
        W, several = W * unit, [quantized * unit for quantized in several]
    signal = _energy(W, H)
    return [float(_energy(W - one, H).clamp(min=0) / signal) if signal > 0 else 0.0 for one in several]


def _energy(W: torch.Tensor, H: torch.Tensor | None) -> torch.Tensor:
    """tr(W H W^T)."""
    return W.square().sum() if H is None else ((W @ H) * W).sum()
