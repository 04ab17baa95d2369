"""Layers that produce the units, fitted to the drift of their inputs: the same correction as that of a projection."""

from __future__ import annotations

import torch

from compress.prune.compensate import corrections
from compress.prune.statistics import Statistics


def input_correction(
    W: torch.Tensor, fit: Statistics, held: Statistics, shares: tuple[float, ...]
) -> tuple[torch.Tensor, float] | None:
    """K [in, in] and its share of the ridge, so that W + W K is best on held-out text; None where W itself is.

    Args:
        W: float64 [out, in], all layers with this input, one below the other.
        fit, held: with the identity in the place of W: their lag is D = E[(x - x^) x^T].
        shares: of the mean diagonal of C that a ridge may have.

    W + W K with K = D (C + lambda I)^-1 minimises E||W x - (W + W K) x^||^2 + lambda ||W K||^2.
    """
    best, least = None, 0.0
    for share in shares:
        K, _ = corrections(fit, share)
        A = W @ K
        gained = float(((A @ held.C) * A).sum() - 2 * (A * (W @ held.lag)).sum())
        if gained < least:
            best, least = (K, share), gained
    return best
