"""The search for the best clip ratio of many groups at once, through a table of rounding errors.

With the largest magnitude of its group as the unit, a weight x lies in [-1, 1], and its rounding error under the scale
r / high, for a clip ratio r, is a function of x and r alone:

    E[x, r] = |x - (r / high) clamp(round(x high / r), low, high)|^power

So E is tabulated once, on a grid of x much finer than the codes', and the errors of a group under all ratios are the
sum of one row for each of its weights: one pass over the weights instead of one for each ratio. What the table cannot
see is the rounding of the scale to the dtype it is stored in, which is much finer than the steps between ratios.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from compress.scheme import Scheme

SMALLEST_RATIO, LARGEST_RATIO, RATIOS = 0.45, 1.05, 61
BINS = 1024  # between 0 and the largest magnitude: over 60 to a step of 4 bits at every ratio
MOST_BITS = 4  # of more bits, such a grid would tell too little
_LANES = 16  # float32 numbers that a vector instruction adds; rows of the table are filled up to a multiple
_WEIGHTS_AT_ONCE = 2**18  # of which all that is computed stays in a core's cache


def best_ratios(W: torch.Tensor, scheme: Scheme, power: float) -> torch.Tensor:
    """The clip ratio per group with the least sum of |error|^power, float32 [out, groups].

    Args:
        W: float32 [out, in], finite.
        scheme: symmetric, of at most `MOST_BITS` bits.
    """
    out, width = W.shape
    ratios = torch.linspace(SMALLEST_RATIO, LARGEST_RATIO, RATIOS)
    table = _table(ratios, scheme, power).to(W.device)
    groups = scheme.groups(width)
    best = torch.empty(out, groups, dtype=torch.int64, device=W.device)
    rows = max(1, _WEIGHTS_AT_ONCE // width)
    for start in range(0, out, rows):
        grouped = W[start : start + rows].reshape(-1, width // groups)
        errors = functional.embedding_bag(_bins(grouped), table, mode="sum")[:, :RATIOS]
        best[start : start + rows] = errors.argmin(dim=-1).reshape(-1, groups)
    return ratios.to(W.device)[best]


def _bins(grouped: torch.Tensor) -> torch.Tensor:
    """Rows of the table for weights [groups, size], int32; groups of zeros have the row of zero."""
    largest = grouped.abs().amax(dim=-1, keepdim=True)
    unit = torch.where(largest == 0, 1.0, largest)
    return (grouped / unit).mul_(BINS).round_().add_(BINS).to(torch.int32)


def _table(ratios: torch.Tensor, scheme: Scheme, power: float) -> torch.Tensor:
    """E of the module's text, float32 [2 BINS + 1, RATIOS, filled up with zeros]."""
    low, high = scheme.code_range
    x = torch.linspace(-1, 1, 2 * BINS + 1).unsqueeze(1)
    s = ratios / high
    errors = ((x / s).round_().clamp_(low, high).mul_(s) - x).abs_().pow_(power)
    return functional.pad(errors, (0, -len(ratios) % _LANES)).contiguous()
