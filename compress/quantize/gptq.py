"""GPTQ: round the columns one after the other and let the columns still to come repair the error.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", arXiv 2210.17323; letters as there. For one linear layer with inputs X, the output error of a changed
weight is tr(dW H dW^T) with H = X^T X (the factor 2 of the paper cancels). If column i of W is rounded, the least
harmful change of the other columns is, by eq. (2),

    err = (w_i - quant(w_i)) / [H^-1]_ii,     w_j <- w_j - err [H^-1]_ij   for every j not yet rounded,

and eq. (3) removes row and column i from H^-1. Both come out of one upper Cholesky factor U of H^-1 = U^T U: when
column i is due, row i of U divided by U_ii is the row of the current H^-1 divided by its diagonal (algorithm 1).

Two choices matter more than the sweep itself:
- Columns are rounded in order of falling H_ii ("static activation order"): what sees the largest inputs is rounded
  while most other columns can still repair it. Groups stay those of the natural order and their scales are fixed
  before the sweep, so nothing has to be reordered at run time.
- A group's scale is searched with its error weighted by H_ii (`grid.search_scale`).

A Hessian that cannot be factored is not a reason to stop: damping is raised stepwise and recorded. A Hessian that
is not finite is: something before this layer overflowed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.quantize.grid import search_scale
from compress.scheme import QuantizedWeight, Scheme

SWEEP_COLUMNS = 128  # columns updated one by one before the rest of the matrix is updated at once
DAMPING_STEPS = 6
DAMPING_FACTOR = 10.0
LEAST_RAISED_DAMPING = 1e-4


@dataclass(frozen=True)
class GptqResult:
    """Attributes:
    damping: share of mean(diag H) added to the diagonal in the end; None if no factorization succeeded and the
        weight was rounded to nearest instead.
    dead_columns: inputs that were zero for every calibration token.
    """

    weight: QuantizedWeight
    damping: float | None
    dead_columns: int


def gptq(W: torch.Tensor, H: torch.Tensor, scheme: Scheme, *, scale_dtype: torch.dtype, damping: float) -> GptqResult:
    """Quantizes one weight.

    Args:
        W: float32 [out, in].
        H: float32 [in, in], sum or mean over tokens of x x^T, finite.
        damping: share of mean(diag H) added to the diagonal; raised stepwise while the factorization fails.
    """
    h = H.diagonal()
    dead = h == 0
    scale = search_scale(W, scheme, scale_dtype, h)  # [out, groups]
    order = torch.argsort(h, descending=True, stable=True)
    factored = factor(H[order][:, order], dead[order], damping)
    if factored is None:
        nearest = (W / _columns(scale, W.shape[1])).round().clamp(*scheme.code_range).to(torch.int8)
        return GptqResult(QuantizedWeight(nearest, scale, None, scheme), None, int(dead.sum()))
    U, used = factored
    codes = sweep(W[:, order].clone(), U, _columns(scale, W.shape[1])[:, order], scheme)
    natural = torch.empty_like(codes)
    natural[:, order] = codes
    return GptqResult(QuantizedWeight(natural, scale, None, scheme), used, int(dead.sum()))


def _columns(scale: torch.Tensor, width: int) -> torch.Tensor:
    """Scale of every column: [out, groups] -> float32 [out, in]."""
    return scale.float().repeat_interleave(width // scale.shape[1], dim=1)


def factor(H: torch.Tensor, dead: torch.Tensor, damping: float) -> tuple[torch.Tensor, float] | None:
    """Upper Cholesky factor U [in, in] of the inverse of the damped Hessian, and the damping it took.

    Computed in float64: the inverse of a nearly singular matrix is where float32 runs out of digits. A dead
    input has no row of its own in H; a one on its diagonal keeps it apart from all others. None if even the
    largest damping fails.
    """
    base = H.double()
    base.diagonal()[dead] = 1.0
    alive = H.diagonal()[~dead]
    mean = float(alive.double().mean()) if alive.numel() else 1.0
    for _ in range(DAMPING_STEPS):
        damped = base.clone()
        damped.diagonal().add_(damping * mean)
        U = _inverse_factor(damped)
        if U is not None:
            return U.float(), damping
        damping = max(damping * DAMPING_FACTOR, LEAST_RAISED_DAMPING)
    return None


def _inverse_factor(A: torch.Tensor) -> torch.Tensor | None:
    """U with A^-1 = U^T U, or None where A is not positive definite in float32's precision.

    float64 alone would let a singular matrix of float32 sums pass on its rounding noise and give an inverse that
    is nothing but that noise; pivots below float32's resolution count as singular.
    """
    L, failed = torch.linalg.cholesky_ex(A)
    if int(failed) != 0:
        return None
    pivots = L.diagonal().square()
    if bool((pivots < torch.finfo(torch.float32).eps * A.diagonal()).any()):
        return None
    inverse = torch.cholesky_inverse(L)
    U, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    return U if int(failed) == 0 and bool(torch.isfinite(U).all()) else None


def sweep(W: torch.Tensor, U: torch.Tensor, s: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Algorithm 1 with fixed scales: rounds the columns of W from left to right.

    Args:
        W: float32 [out, in], overwritten.
        U: float32 [in, in], upper factor of the inverse Hessian.
        s: float32 [out, in], scale of each column.

    Returns:
        codes int8 [out, in].
    """
    low, high = scheme.code_range
    out, width = W.shape
    codes = torch.empty(out, width, dtype=torch.int8, device=W.device)
    for start in range(0, width, SWEEP_COLUMNS):
        end = min(start + SWEEP_COLUMNS, width)
        block = W[:, start:end].T.contiguous()  # [columns, out]: one column is one contiguous row
        scales = s[:, start:end].T.contiguous()
        errors = torch.empty_like(block)
        chosen = torch.empty_like(block)
        Ublock = U[start:end, start:end]
        for i in range(end - start):
            q = (block[i] / scales[i]).round_().clamp_(low, high)
            chosen[i] = q
            errors[i] = (block[i] - q * scales[i]) / Ublock[i, i]
            if i + 1 < end - start:
                block[i + 1 :].addr_(Ublock[i, i + 1 :], errors[i], alpha=-1)
        codes[:, start:end] = chosen.T.to(torch.int8)
        W[:, end:].addmm_(errors.T, U[start:end, end:], alpha=-1)
    return codes
