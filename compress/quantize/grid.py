"""Scales and rounding: the integer grid under every method.

Letters: W weight [out, in]; s scale [out, groups]; q codes [out, in]; h weight of a column's error [in]; z zero point
[out, groups], the code that stands for zero. A group is `group_size` neighbouring input columns of one output row.

Symmetric b-bit codes are -2^(b-1) .. 2^(b-1)-1 around zero, and scales are positive. Every scale is rounded to the
dtype it will be stored in before a code is chosen, so that what is evaluated is what is stored.

Asymmetric ones have the same range and a zero point in it: the codes stand for (q - z) s, from (low - z) s to
(high - z) s. Zero is always among them, so that exact zeros stay exact; a group without negative weights has the lowest
code for its zero, one without positive weights the highest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from compress.quantize import clip_table
from compress.scheme import QuantizedWeight, Scheme

# Clip ratios tried per group, as shares of the scale that covers the largest weight. Below 0.4 none ever wins at
# 4 bits; a little above 1 pays for groups whose values fall badly between grid points.
SMALLEST_FLOAT16 = 2.0**-24
SMALLEST_RATIO, LARGEST_RATIO, RATIOS = 0.40, 1.05, 45


@dataclass(frozen=True)
class Grid:
    """The numbers that the codes of each group can stand for.

    Attributes:
        scale: [out, groups], finite and positive, in the dtype it is stored in.
        zero_point: int8 [out, groups], within the scheme's range of codes; None where zero is code 0.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


def covering_grid(W: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> Grid:
    """The grid that reaches from the smallest to the largest weight of each group, and to zero.

    Symmetric: `max_abs_scale`. Asymmetric: s = (max - min) / (2^b - 1), z = round(low - min / s), with the minimum at
    most and the maximum at least zero. A group of zeros gets scale 1 and zero point 0.

    Args:
        W: float32 [out, in].
        dtype: dtype the scale is stored in.
    """
    if scheme.symmetric:
        return Grid(max_abs_scale(W, scheme, dtype))
    least, most = _range(W, scheme)
    scale = stored_scale((most - least) / _steps(scheme), dtype)
    return Grid(scale, _zero_point(least, most, scale, scheme))


def searched_grid(
    W: torch.Tensor, scheme: Scheme, dtype: torch.dtype, h: torch.Tensor | None = None, power: float = 2.0
) -> Grid:
    """The grid per group with the least weighted rounding error; see `search_scale`, which it is where symmetric."""
    if scheme.symmetric:
        return Grid(search_scale(W, scheme, dtype, h, power))
    groups = scheme.groups(W.shape[1])
    grouped = W.reshape(W.shape[0], groups, -1)
    weights = _column_weights(h, groups, W.shape[1], W)
    best = covering_grid(W, scheme, dtype)
    assert best.zero_point is not None
    scale, zero, low_high = best.scale, best.zero_point, scheme.code_range
    best_error = torch.full_like(scale, float("inf"), dtype=torch.float32)
    for candidate, z in chain([(scale, zero)], _candidates(W, scheme, dtype)):
        s = candidate.float().unsqueeze(-1)
        low, high = (bound - z.float().unsqueeze(-1) for bound in low_high)  # counted from the zero point
        error = _error(grouped, (grouped / s).round_().clamp_(low, high).mul_(s), weights, power)
        better = error < best_error
        scale, zero = torch.where(better, candidate, scale), torch.where(better, z, zero)
        best_error = torch.where(better, error, best_error)
    zeros = (grouped == 0).all(dim=-1)
    return Grid(torch.where(zeros, best.scale, scale), torch.where(zeros, best.zero_point, zero))


def _candidates(W: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scales and zero points [out, groups]: the range of each group clipped, its zero also a code up and down."""
    least, most = _range(W, scheme)
    low, high = scheme.code_range
    for ratio in torch.linspace(SMALLEST_RATIO, LARGEST_RATIO, RATIOS).tolist():
        scale = stored_scale((most - least) * (ratio / _steps(scheme)), dtype)
        zero = _zero_point(least * ratio, most * ratio, scale, scheme)
        for step in (0, -1, 1):
            yield scale, (zero + step).clamp_(low, high)


def _steps(scheme: Scheme) -> int:
    low, high = scheme.code_range
    return high - low


def _range(W: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest weight of each group [out, groups], and zero."""
    least, most = W.reshape(W.shape[0], scheme.groups(W.shape[1]), -1).aminmax(dim=-1)
    return least.clamp(max=0), most.clamp(min=0)


def _zero_point(least: torch.Tensor, most: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """int8 [out, groups]. Ranges that end at zero have it at their end, however the scale was rounded."""
    low, high = scheme.code_range
    zero = (low - least / scale.float()).round_().clamp_(low, high)
    zero = torch.where(most == 0, float(high), zero)
    zero = torch.where(least == 0, float(low), zero)
    return torch.where((most == 0) & (least == 0), 0.0, zero).to(torch.int8)


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


def to_codes(
    W: torch.Tensor, scale: torch.Tensor, scheme: Scheme, zero_point: torch.Tensor | None = None
) -> torch.Tensor:
    """Round to nearest: q = clamp(round(W / s) + z), int8 [out, in]."""
    low, high = scheme.code_range
    out, width = W.shape
    grouped = (W.reshape(out, scale.shape[1], -1) / scale.float().unsqueeze(-1)).round_()
    if zero_point is not None:
        grouped += zero_point.unsqueeze(-1)
    return grouped.clamp_(low, high).to(torch.int8).reshape(out, width)


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
    if h is None and scheme.bits <= clip_table.MOST_BITS and _is_normal(start, dtype):
        return stored_scale(start * clip_table.best_ratios(W, scheme, power), dtype)
    best = stored_scale(start, dtype)
    best_error = torch.full((out, groups), float("inf"), device=W.device)
    for ratio in torch.linspace(SMALLEST_RATIO, LARGEST_RATIO, RATIOS).tolist():
        candidate = stored_scale(start * ratio, dtype)
        s = candidate.float().unsqueeze(-1)
        error = _error(grouped, (grouped / s).round_().clamp_(low, high).mul_(s), weights, power)
        better = error < best_error
        best = torch.where(better, candidate, best)
        best_error = torch.where(better, error, best_error)
    return torch.where((grouped == 0).all(dim=-1), stored_scale(start, dtype), best)


def _is_normal(scale: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all clipped scales keep their digits in `dtype`, which does not reach as far as float32."""
    limits, least, most = torch.finfo(dtype), *scale.aminmax()
    lowest, highest = float(least) * clip_table.SMALLEST_RATIO, float(most) * clip_table.LARGEST_RATIO
    return limits.smallest_normal <= lowest and highest <= limits.max


def _error(grouped: torch.Tensor, rounded: torch.Tensor, weights: torch.Tensor, power: float) -> torch.Tensor:
    """Weighted error of each group, [out, groups]; `rounded` is overwritten."""
    error = rounded.sub_(grouped).abs_()
    return (error.square_() if power == 2.0 else error.pow_(power)).mul_(weights).sum(dim=-1)


def _column_weights(h: torch.Tensor | None, groups: int, width: int, W: torch.Tensor) -> torch.Tensor:
    if h is None:
        return torch.ones(1, 1, 1, device=W.device)
    weights = h.float().reshape(groups, width // groups)
    dead = weights.sum(dim=-1, keepdim=True) == 0
    return torch.where(dead, torch.ones_like(weights), weights).unsqueeze(0)


def quantize_nearest(
    W: torch.Tensor, scale: torch.Tensor, scheme: Scheme, zero_point: torch.Tensor | None = None
) -> QuantizedWeight:
    """Round to nearest on given scales and zero points."""
    return QuantizedWeight(to_codes(W, scale, scheme, zero_point), scale, zero_point, scheme)


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
