"""The weights that make up best for what was removed, in closed form. Letters as in `statistics` and `importance`.

With y = W x + r - r^ what the block is to add up, ridge least squares towards W give the target of all columns

    W* = W + (E[W (x - x^) x^T] + rho E[(r - r^) x^T]) (C + lambda I)^-1

(the drift of earlier blocks corrected; compare "GPTAQ", arXiv 2504.02692, and the full sequence of "OSSCAR",
arXiv 2403.12983), and of the kept columns S alone, shrunk towards W*_S,

    W'_S = W*_S + W*_P C_PS (C_SS + a mean(diag C) I)^-1,

which is what the downdates of optimal brain surgery end at. Where the projection has a bias, the moments are centred
and

    b' = b + E[W x + rho (r - r^)] - W' E[x^].
"""

from __future__ import annotations

import torch

from compress.prune.statistics import Statistics


def ridge(C: torch.Tensor, share: float) -> float:
    """lambda = share mean(diag C); 1 where C is 0."""
    return share * float(C.diagonal().mean()) or 1.0


def damped(C: torch.Tensor, added: float) -> torch.Tensor:
    """C + added I."""
    return C + added * torch.eye(len(C), dtype=C.dtype, device=C.device)


def solved(M: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """M C^-1 for a positive definite C."""
    return torch.cholesky_solve(M.T, torch.linalg.cholesky(C)).T


def corrections(statistics: Statistics, share: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What W* adds to W for the inputs' lag, and for rho = 1 also for the residual's drift, [out, in] each."""
    C, out = damped(statistics.C, ridge(statistics.C, share)), len(statistics.lag)
    if statistics.drift is None:
        return solved(statistics.lag, C), None
    both = solved(torch.cat([statistics.lag, statistics.drift]), C)
    return both[:out], both[out:]


def compensated(W: torch.Tensor, C: torch.Tensor, there: torch.Tensor, added: float) -> torch.Tensor:
    """W' [out, in], 0 in the columns that are gone.

    Args:
        W: float64 [out, in], the target.
        there: bool [in], columns that stay.
        added: what the ridge adds to the diagonal of C [in, in].
    """
    S, P = there.nonzero()[:, 0], (~there).nonzero()[:, 0]
    changed = torch.zeros_like(W)
    changed[:, S] = W[:, S] + solved(W[:, P] @ C[P][:, S], damped(C[S][:, S], added))
    return changed


def shift_of(W: torch.Tensor, changed: torch.Tensor, statistics: Statistics, rho: float) -> torch.Tensor:
    """b' - b [out]."""
    missing = statistics.mean_lag + rho * statistics.mean_drift
    return missing + (W - changed) @ statistics.mean_input
