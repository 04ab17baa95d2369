"""Which inputs of an output projection go: the loss of output that is left after the best compensation.

Units are runs of columns: one channel of a feed-forward network, the columns of one head, or of all query heads of one
key and value head. W [out, in] is the projection's weight (or what it should be), C~ [in, in] the damped second moment
of its inputs, and the objective of the kept columns S is the quadratic

    f(S) = min over W' with no other columns of  tr((W - W') C~ (W - W')^T).

Removing unit g and compensating with all that are left costs exactly (Hassibi, Stork 1993, "Second order derivatives
for network pruning: optimal brain surgeon", for blocks of columns and of output rows: Kurtic et al. 2023, "ZipLM")

    eps_g = tr(W_g ([B]_gg)^-1 W_g^T),    B = (C~_SS)^-1,

after which (downdate)   W <- W - W_P ([B]_PP)^-1 B_P,:     and   B <- B - B_:P ([B]_PP)^-1 B_P:.

Afterwards kept and removed units are exchanged while the objective falls (Meng et al. 2024, "OSSCAR"). Weighting the
outputs by a metric G, tr(G (W - W') C~ (W - W')^T), is the same with G^1/2 W in the place of W (`in_metric`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TRIED = 4  # removed channels that may come back alone, before the exchanges end


@dataclass(frozen=True)
class Fit:
    """The best fit of the columns that are there.

    Attributes:
        W: float64 [out, in], 0 where a column is gone.
        B: float64 [in, in], inverse of C~ over the columns that are there, 0 elsewhere.
        there: bool [units].
    """

    W: torch.Tensor
    B: torch.Tensor
    there: torch.Tensor


def in_metric(W: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """G^1/2 W, float64 [out, in], for G [out, out], symmetric and positive up to rounding."""
    values, vectors = torch.linalg.eigh(G.double())
    half: torch.Tensor = values.clamp_min(0).sqrt().unsqueeze(1) * vectors.T
    return half @ W


def whole(W: torch.Tensor, C: torch.Tensor, size: int) -> Fit:
    """All columns there, in units of `size`."""
    B = torch.cholesky_inverse(torch.linalg.cholesky(C))
    return Fit(W, B, torch.ones(W.shape[1] // size, dtype=torch.bool, device=W.device))


def saliencies(fit: Fit) -> torch.Tensor:
    """eps_g of every unit that is there, float64 [units]; infinite for the others."""
    units = len(fit.there)
    size = fit.W.shape[1] // units
    eps = torch.full((units,), torch.inf, dtype=torch.float64, device=fit.W.device)
    there = fit.there.nonzero()[:, 0]
    if size == 1:
        eps[there] = fit.W[:, there].pow(2).sum(0) / fit.B.diagonal()[there]
        return eps
    blocks = fit.B.reshape(units, size, units, size)[there, :, there]  # [there, size, size]
    W = fit.W.reshape(-1, units, size)[:, there].permute(1, 2, 0)  # [there, size, out]
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(blocks), W, upper=False)
    eps[there] = half.pow(2).sum((1, 2))
    return eps


def columns(units: torch.Tensor, size: int) -> torch.Tensor:
    """Columns of some units, int64 [units * size]."""
    return (units.unsqueeze(1) * size + torch.arange(size, device=units.device)).reshape(-1)


def _block_loss(fit: Fit, P: torch.Tensor) -> torch.Tensor:
    """What removing columns P together costs."""
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(fit.B[P][:, P]), fit.W[:, P].T, upper=False)
    loss: torch.Tensor = half.pow(2).sum()
    return loss


def removed(fit: Fit, units: torch.Tensor) -> Fit:
    """The fit without some more units."""
    P = columns(units, fit.W.shape[1] // len(fit.there))
    B_P = fit.B[P]
    moved = torch.cholesky_solve(B_P, torch.linalg.cholesky(B_P[:, P]))  # [P, in], ([B]_PP)^-1 B_P,:
    W = fit.W - fit.W[:, P] @ moved
    B = fit.B - B_P.T @ moved
    W[:, P], B[P], B[:, P] = 0, 0, 0
    there = fit.there.clone()
    there[units] = False
    return Fit(W, B, there)


@dataclass(frozen=True)
class _Outside:
    """What bringing removed columns Q back would change.

    Attributes:
        Q: int64, the columns.
        R: [out, Q], residual correlation (W - W') C~_:Q.
        F: [in, Q], B C~_:Q.
    """

    Q: torch.Tensor
    R: torch.Tensor
    F: torch.Tensor


def _outside(fit: Fit, W: torch.Tensor, C: torch.Tensor, units: torch.Tensor) -> _Outside:
    Q = columns(units, W.shape[1] // len(fit.there))
    C_Q = C[:, Q]
    return _Outside(Q, (W - fit.W) @ C_Q, fit.B @ C_Q)


def _gains(outside: _Outside, C: torch.Tensor, size: int) -> torch.Tensor:
    """By how much the objective falls if one of the units comes back, [units]: tr(R_g S_gg^-1 R_g^T)."""
    Q, R, F = outside.Q, outside.R, outside.F
    if size == 1:
        return R.pow(2).sum(0) / (C.diagonal()[Q] - (C[:, Q] * F).sum(0))
    gains = []
    for start in range(0, len(Q), size):
        g = slice(start, start + size)
        S = C[Q[g]][:, Q[g]] - C[Q[g]] @ F[:, g]
        gains.append((R[:, g] @ torch.linalg.solve(S, R[:, g].T)).diagonal().sum())
    return torch.stack(gains)


def restored(fit: Fit, W: torch.Tensor, C: torch.Tensor, units: torch.Tensor) -> tuple[Fit, torch.Tensor]:
    """The fit with some units back, and by how much the objective falls."""
    outside = _outside(fit, W, C, units)
    Q, R, F = outside.Q, outside.R, outside.F
    S = C[Q][:, Q] - C[Q] @ F
    L = torch.linalg.cholesky((S + S.T) / 2)
    new = torch.cholesky_solve(R.T, L).T  # [out, Q], the weights of the columns that are back
    changed = fit.W - new @ F.T
    changed[:, Q] = new
    inverse = torch.cholesky_inverse(L)
    moved = F @ inverse
    B = fit.B + moved @ F.T
    B[:, Q], B[Q] = -moved, -moved.T
    B[Q.unsqueeze(1), Q] = inverse
    there = fit.there.clone()
    there[units] = True
    return Fit(changed, B, there), (new * R).sum()


def greedy(fit: Fit, keep: int, *, groups: int = 1, step: int = 1) -> Fit:
    """Removes the cheapest units until `keep` are there, the same number in every one of `groups` equal runs of units.

    Args:
        step: units that go together, before the others' costs are computed anew; one where there are several groups.
    """
    group = torch.arange(len(fit.there), device=fit.there.device) // (len(fit.there) // groups)
    while (left := int(fit.there.sum()) - keep) > 0:
        eps = saliencies(fit)
        full = torch.bincount(group[fit.there], minlength=groups) <= keep // groups  # groups that may lose no more
        eps[full[group]] = torch.inf
        count = min(step, left) if groups == 1 else 1
        fit = removed(fit, eps.argsort(stable=True)[:count])
    return fit


def swapped(fit: Fit, W: torch.Tensor, C: torch.Tensor, *, groups: int = 1, count: int = 1, rounds: int = 20) -> Fit:
    """Exchanges removed units for kept ones while the objective falls, in every group as many as before.

    Args:
        W, C: of all columns.
        count: channels that are exchanged together at first; fewer when that does not help. Heads go one at a time.
        rounds: exchanges at most.
    """
    size = W.shape[1] // len(fit.there)
    count = count if size == groups == 1 else 1
    for _ in range(rounds):
        outside = (~fit.there).nonzero()[:, 0]
        if not len(outside):
            break
        promising = outside[_gains(_outside(fit, W, C, outside), C, size).argsort(descending=True, stable=True)]
        better = None
        while better is None and count > 1:
            better = _exchanged(fit, W, C, promising[:count], groups)
            count = count // 2 if better is None else count
        singles = promising[: TRIED if size == 1 else len(promising)].unsqueeze(1)
        if better is None:
            better = next((new for one in singles if (new := _exchanged(fit, W, C, one, groups)) is not None), None)
        if better is None:
            break
        fit = better
    return fit


def _exchanged(fit: Fit, W: torch.Tensor, C: torch.Tensor, back: torch.Tensor, groups: int) -> Fit | None:
    """The fit with units `back` in the places of the then cheapest ones of their group; None if that is no better."""
    larger, gain = restored(fit, W, C, back)
    eps = saliencies(larger)
    if groups > 1:
        group = torch.arange(len(eps), device=eps.device) // (len(eps) // groups)
        eps[group != group[back]] = torch.inf
    gone = eps.argsort(stable=True)[: len(back)]
    loss = _block_loss(larger, columns(gone, W.shape[1] // len(eps)))
    return removed(larger, gone) if float(loss) < float(gain) * (1 - 1e-9) else None


def by_score(scores: torch.Tensor, keep: int, *, groups: int = 1) -> torch.Tensor:
    """bool [units]: the units with the highest scores, the same number in every one of `groups` equal runs of units.

    Equal scores: the unit in front stays.
    """
    there = torch.zeros(groups, len(scores) // groups, dtype=torch.bool, device=scores.device)
    order = scores.reshape(groups, -1).argsort(dim=1, descending=True, stable=True)
    return there.scatter_(1, order[:, : keep // groups], True).reshape(-1)
