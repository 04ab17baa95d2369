"""GPTQ: round the columns one after the other and let the columns still to come repair the error.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", arXiv 2210.17323; letters as there. For one linear layer with inputs X, the output error of a changed
weight is tr(dW H dW^T) with H = X^T X (the factor 2 of the paper cancels). If column i of W is rounded, the least
harmful change of the other columns is, by eq. (2),

    err = (w_i - quant(w_i)) / [H^-1]_ii,     w_j <- w_j - err [H^-1]_ij   for every j not yet rounded,

and eq. (3) removes row and column i from H^-1. Both come out of one upper Cholesky factor U of H^-1 = U^T U: when
column i is due, row i of U divided by U_ii is the row of the current H^-1 divided by its diagonal (algorithm 1).

What is done beyond algorithm 1 (`GptqSettings` switches each off; scripts/bench_engine.py measures what each brings):
- Columns are rounded in order of falling H_ii ("static activation order"): what sees the largest inputs is rounded
  while most other columns can still repair it. Groups stay those of the natural order and their scales are fixed
  before the sweep, so nothing has to be reordered at run time.
- A group's scale is searched with the error of a column weighted by what it costs once the columns after it have
  repaired what they can, 1 / U_ii^2 (`grid.search_scale`).
- The target of the sweep need not be W. With x the inputs in the quantized model, x~ those in the original one, and
  r, r~ what the layer's output is added to, the weights that bring Q x + r closest to W x~ + r~ are

      W* = W + (W D + R) (H + lambda I)^-1,     D = mean (x~ - x) x^T,   R = mean (r~ - r) x^T

  (least squares), and the error of any Q is that of W* plus tr((Q - W*) H (Q - W*)^T): sweeping W* instead of W
  corrects errors of earlier layers, where plain GPTQ only does not repeat them. (Asymmetric calibration: Li et al.,
  "GPTAQ", arXiv 2504.02692, which corrects inside the sweep; here it is solved before it.)
- Afterwards scales and codes are polished (`polish`).

A Hessian that cannot be factored is not a reason to stop: damping is raised stepwise and recorded. A Hessian that
is not finite is: something before this layer overflowed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from scipy.linalg.lapack import dpotrs, dtrtri

from compress.quantize.grid import Grid, covering_grid, searched_grid
from compress.quantize.polish import local_search, refit_scales
from compress.quantize.statistics import Statistics, mean_alive
from compress.scheme import QuantizedWeight, Scheme

SWEEP_COLUMNS = 128  # columns updated one by one before the rest of the matrix is updated at once
DAMPING_STEPS = 6
DAMPING_FACTOR = 10.0
LEAST_RAISED_DAMPING = 1e-4


@dataclass(frozen=True)
class GptqSettings:
    """Every idea beyond algorithm 1, so that each can be switched off.

    Attributes:
        damping: share of mean(diag H) added to the diagonal; raised stepwise while the factorization fails.
        activation_order: round columns in order of falling H_ii instead of from left to right.
        search_scales: search each group's scale; without it the largest weight decides.
        asymmetric: correct the drift of the inputs from the original model's, and that of the residual.
        asymmetric_damping: lambda of that correction, as a share of mean(diag H). It follows the sample's noise where
            the sweep does not, so it needs much more.
        refit_scales: solve for the scales again once the codes are chosen.
        local_search: passes of coordinate descent over the codes.
    """

    damping: float = 0.05
    activation_order: bool = True
    search_scales: bool = True
    asymmetric: bool = True
    asymmetric_damping: float = 0.5
    refit_scales: bool = True
    local_search: int = 2


@dataclass(frozen=True)
class GptqResult:
    """Attributes:
    weight: the codes and scales.
    latent: float32 [out, in], W / s + z at the moment it was rounded: what learning starts from.
    target: float32 [out, in], W*, what the codes were fitted to.
    damping: share of mean(diag H) added to the diagonal in the end; None if no factorization succeeded and the
        weight was rounded to nearest instead.
    """

    weight: QuantizedWeight
    latent: torch.Tensor
    target: torch.Tensor
    damping: float | None


@dataclass(frozen=True)
class Prepared:
    """What all layers with a common input share.

    Attributes:
        statistics: normalised.
        order: int64 [in], the columns in the order in which they are rounded.
        U: float32 [in, in], upper factor of the inverse of the damped H[order][:, order]; None if no damping helped.
        damping: the share that it took; None if none did.
        dead: inputs that were zero for every calibration token.
        L: float64 [in, in], lower Cholesky factor of H with the damping of the correction; None where nothing is to
            be corrected.
    """

    statistics: Statistics
    order: torch.Tensor
    U: torch.Tensor | None
    L: torch.Tensor | None
    damping: float | None
    dead: int

    def aimed(self) -> Prepared:
        """Without what only `aim` needs, a third of the whole."""
        return replace(self, statistics=Statistics(self.statistics.H, None, None, self.statistics.tokens), L=None)

    @property
    def importance(self) -> torch.Tensor:
        """What a rounding error of each column costs in the end, float32 [in], 0 for dead inputs.

        1 / U_ii^2 is the part of input i that the columns still to come cannot repair; H_ii would be its cost if
        nothing were repaired.
        """
        h = self.statistics.H.diagonal()
        if self.U is None:
            return h
        cost = torch.empty_like(h)
        cost[self.order] = self.U.diagonal().pow(-2)
        return cost.masked_fill_(h == 0, 0.0)


def prepare(statistics: Statistics, settings: GptqSettings) -> Prepared:
    """Factors the Hessian of finite statistics."""
    statistics = statistics.normalised()
    h = statistics.H.diagonal()
    dead = h == 0
    order = torch.argsort(h, descending=True, stable=True)
    if not settings.activation_order:
        order = torch.arange(len(h), device=h.device)
    factored = factor(statistics.H[order][:, order], dead[order], settings.damping)
    U, damping = factored if factored is not None else (None, None)
    drifts = statistics.input_drift is not None or statistics.residual_drift is not None
    L = None
    if settings.asymmetric and drifts and damping is not None:
        A = _damped(statistics.H, dead, max(damping, settings.asymmetric_damping))
        L = torch.linalg.cholesky(A)
    return Prepared(statistics, order, U, L, damping, int(dead.sum()))


def aim(W: torch.Tensor, prepared: Prepared, scheme: Scheme) -> torch.Tensor:
    """W*, what the codes of W are fitted to, float32 [out, in]; W itself where nothing is to be corrected."""
    if prepared.L is None:
        return W
    return corrected(W, prepared.statistics, prepared.L).masked_fill_(_zero_groups(W, scheme), 0.0)


def gptq(
    W: torch.Tensor,
    prepared: Prepared,
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype,
    settings: GptqSettings,
    target: torch.Tensor | None = None,
) -> GptqResult:
    """Quantizes one weight W, float32 [out, in].

    Args:
        target: what `aim` gives for W; None where that is still to be done.
    """
    h, order, U = prepared.importance, prepared.order, prepared.U
    if U is None:
        return _nearest(W, h, scheme, scale_dtype, settings)
    zero, before = _zero_groups(W, scheme), W
    W = aim(W, prepared, scheme) if target is None else target
    grid = _grid(W, h, scheme, scale_dtype, settings)
    s, z = _columns(grid.scale, W.shape[1]), _zeros(grid, W.shape[1])
    codes, latent = sweep(W[:, order], U, s[:, order], scheme, None if z is None else z[:, order])
    if not bool(torch.isfinite(latent).all()):
        return _nearest(before, h, scheme, scale_dtype, settings)
    natural = torch.argsort(order)
    weight = QuantizedWeight(codes[:, natural], grid.scale, grid.zero_point, scheme)
    weight = _polished(W, prepared, weight, settings)
    weight = replace(weight, codes=weight.codes.where(~zero, 0 if z is None else z.to(torch.int8)))
    return GptqResult(weight, latent[:, natural], W, prepared.damping)


def _nearest(
    W: torch.Tensor, h: torch.Tensor, scheme: Scheme, dtype: torch.dtype, settings: GptqSettings
) -> GptqResult:
    """What is left where the Hessian is of no use."""
    grid = _grid(W, h, scheme, dtype, settings)
    latent, z = W / _columns(grid.scale, W.shape[1]), _zeros(grid, W.shape[1])
    if z is not None:
        latent += z
    codes = latent.round().clamp(*scheme.code_range).to(torch.int8)
    return GptqResult(QuantizedWeight(codes, grid.scale, grid.zero_point, scheme), latent, W, None)


def _grid(W: torch.Tensor, h: torch.Tensor, scheme: Scheme, dtype: torch.dtype, settings: GptqSettings) -> Grid:
    return searched_grid(W, scheme, dtype, h) if settings.search_scales else covering_grid(W, scheme, dtype)


def _zero_groups(W: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Where the groups of W are that hold nothing but zeros and are to stay so, bool [out, in]."""
    groups = scheme.groups(W.shape[1])
    zero = (W.reshape(W.shape[0], groups, -1) == 0).all(dim=-1)
    return zero.repeat_interleave(W.shape[1] // groups, dim=1)


def _columns(scale: torch.Tensor, width: int) -> torch.Tensor:
    """Scale of every column: [out, groups] -> float32 [out, in]."""
    return scale.float().repeat_interleave(width // scale.shape[1], dim=1)


def _zeros(grid: Grid, width: int) -> torch.Tensor | None:
    """Zero point of every column, float32 [out, in]; None where there are none."""
    return None if grid.zero_point is None else _columns(grid.zero_point, width)


def corrected(W: torch.Tensor, statistics: Statistics, L: torch.Tensor) -> torch.Tensor:
    """W* of the module's text, float32 [out, in]; L [in, in] with L L^T = H + lambda I.

    A row whose correction would be larger than the row itself keeps its weights: its inputs cannot carry what is to be
    corrected.
    """
    drift = torch.zeros_like(W)
    if statistics.input_drift is not None:
        drift += W @ statistics.input_drift
    if statistics.residual_drift is not None:
        drift += statistics.residual_drift
    step = _solved(L, drift.T.to(L.dtype)).T.to(W.dtype)
    sensible = step.norm(dim=1, keepdim=True) <= W.norm(dim=1, keepdim=True)  # False also where it is not finite
    return torch.where(sensible, W + step, W)


def _solved(L: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """X with L L^T X = B; on the CPU in the place of a column-major B, and without torch's copy of the factor."""
    if L.device.type != "cpu":
        return torch.cholesky_solve(B, L)
    solution, _ = dpotrs(L.numpy(), B.numpy(), lower=1, overwrite_b=1)
    return torch.from_numpy(solution)


def _polished(W: torch.Tensor, prepared: Prepared, weight: QuantizedWeight, settings: GptqSettings) -> QuantizedWeight:
    """Scales, codes, scales again, on the Hessian as it was damped for the sweep, but never quite undamped."""
    if not (settings.refit_scales or settings.local_search):
        return weight
    H = prepared.statistics.H.clone()
    H.diagonal().add_(max(prepared.damping or 0.0, LEAST_RAISED_DAMPING) * mean_alive(H))
    if settings.refit_scales:
        weight = refit_scales(W, H, weight)
    weight = local_search(W, H, weight, prepared.order, settings.local_search)
    if settings.refit_scales and settings.local_search:
        weight = refit_scales(W, H, weight)
    return weight


def factor(H: torch.Tensor, dead: torch.Tensor, damping: float) -> tuple[torch.Tensor, float] | None:
    """Upper Cholesky factor U [in, in] of the inverse of the damped Hessian, and the damping it took.

    Computed in float64: the inverse of a nearly singular matrix is where float32 runs out of digits. A dead
    input has no row of its own in H; a one on its diagonal keeps it apart from all others. None if even the
    largest damping fails.
    """
    for _ in range(DAMPING_STEPS):
        U = _inverse_factor(_damped(H, dead, damping))
        if U is not None:
            return U.to(torch.float32, memory_format=torch.contiguous_format), damping
        damping = max(damping * DAMPING_FACTOR, LEAST_RAISED_DAMPING)
    return None


def _damped(H: torch.Tensor, dead: torch.Tensor, damping: float) -> torch.Tensor:
    """H + damping mean(diag H) I in float64, with a one on the diagonal of dead inputs."""
    A = H.to(torch.float64, copy=True)
    A.diagonal()[dead] = 1.0
    A.diagonal().add_(damping * mean_alive(H))
    return A


def _inverse_factor(A: torch.Tensor) -> torch.Tensor | None:
    """U with A^-1 = U^T U, or None where A is not positive definite in float32's precision.

    float64 alone would let a singular matrix of float32 sums pass on its rounding noise and give an inverse that
    is nothing but that noise; pivots below float32's resolution count as singular.
    """
    diagonal = A.diagonal().clone()
    A = A.flip(0, 1)
    L, failed = torch.linalg.cholesky_ex(A)
    del A  # of a wide layer each of these takes hundreds of megabytes
    if int(failed) != 0:
        return None
    pivots = L.diagonal().square().flip(0)
    if bool((pivots < torch.finfo(torch.float32).eps * diagonal).any()):
        return None
    # with rows and columns reversed twice, A = R R^T for an upper R, so A^-1 = U^T U for U = R^-1
    R = L.mT.flip(0, 1).mT
    del L
    U = _inverse_of_upper(R)
    return U if bool(torch.isfinite(U).all()) else None


def _inverse_of_upper(R: torch.Tensor) -> torch.Tensor:
    """R^-1 of an upper triangular float64 matrix; on the CPU in the place of a column-major R."""
    if R.device.type != "cpu":
        inverse: torch.Tensor = torch.linalg.solve_triangular(R, torch.eye(len(R)).to(R), upper=True)
        return inverse
    found, _ = dtrtri(R.numpy(), overwrite_c=1)
    return torch.from_numpy(found)


def sweep(
    W: torch.Tensor, U: torch.Tensor, s: torch.Tensor, scheme: Scheme, z: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1 with fixed scales: rounds the columns of W from left to right.

    Args:
        W: float32 [out, in].
        U: float32 [in, in], upper factor of the inverse Hessian.
        s: float32 [out, in], scale of each column.
        z: float32 [out, in], its zero point; None where all are 0.

    Returns:
        codes int8 [out, in], and what was rounded, W / s + z, float32 [out, in].
    """
    low, high = scheme.code_range
    rest = W.T.contiguous()  # [in, out]: one column is one contiguous row
    scales, zeros = s.T.contiguous(), None if z is None else z.T.contiguous()
    codes = torch.empty(W.shape[1], W.shape[0], dtype=torch.int8, device=W.device)
    latent = torch.empty_like(rest)
    for start in range(0, W.shape[1], SWEEP_COLUMNS):
        end = min(start + SWEEP_COLUMNS, W.shape[1])
        errors = torch.empty_like(rest[start:end])
        block = U[start:end, start:end]
        for i in range(start, end):
            latent[i] = rest[i] / scales[i]
            if zeros is not None:
                latent[i] += zeros[i]
            q = latent[i].round().clamp_(low, high)
            codes[i] = q.to(torch.int8)
            if zeros is not None:
                q -= zeros[i]
            errors[i - start] = (rest[i] - q * scales[i]) / U[i, i]
            rest[i + 1 : end].addr_(block[i - start, i + 1 - start :], errors[i - start], alpha=-1)
        rest[end:].addmm_(U[start:end, end:].T, errors, alpha=-1)
    return codes.T.contiguous(), latent.T.contiguous()
