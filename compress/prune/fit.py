"""One projection from its statistics: the target, the units that stay, their weights, and the errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from compress.prune.compensate import compensated, corrections, ridge, shift_of
from compress.prune.settings import PruneSettings
from compress.prune.statistics import Statistics, merged
from compress.prune.units import Evidence, Units, chosen


@dataclass(frozen=True)
class Projection:
    """An output projection of the original.

    Attributes:
        W: float64 [out, in].
        bias: float64 [out]; None where it has none.
        dtype, bias_dtype: in which they are stored.
    """

    name: str
    W: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    bias_dtype: torch.dtype


@dataclass(frozen=True)
class Fitted:
    """A projection after the step, at full size.

    Attributes:
        W: float64 [out, in], rounded to the dtype in which it is stored; 0 where a column is gone.
        bias: float64 [out], rounded like it; None where it has none.
        there: bool [units].
        moved: whether columns that stay, or the bias, differ from the original's.
        facts: for `LayerRecord.pruning`.
    """

    W: torch.Tensor
    bias: torch.Tensor | None
    there: torch.Tensor
    moved: bool
    facts: Mapping[str, float | None]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Target:
    """Attributes:
    W: W*.
    rho: share of the residual's drift that it corrects.
    share: of the mean diagonal that was added to C; None where W* is W.
    """

    W: torch.Tensor
    rho: float = 0.0
    share: float | None = None


@dataclass(frozen=True)
class _Candidate:
    """Attributes:
    a: share of the mean diagonal; None where nothing was solved for.
    error: on the held-out text.
    """

    W: torch.Tensor
    shift: torch.Tensor | None
    a: float | None
    error: float


def masked(one: Projection, units: Units, evidence: Evidence, settings: PruneSettings) -> Fitted:
    """Without text, or without compensation: columns go, the others stay as they are."""
    there = chosen(one.name, one.W, one.W, evidence, units, settings)
    W = one.W.masked_fill(~_columns(there, one.W), 0.0)
    return Fitted(W, one.bias, there, moved=False, facts={"ridge": None})


def fitted(
    one: Projection,
    units: Units,
    halves: tuple[Statistics, Statistics],
    held: Statistics,
    evidence: Evidence,
    settings: PruneSettings,
) -> Fitted:
    """The best of the candidates on held-out text; the mask alone where none of them is better than that.

    Args:
        halves, held: of the text that is fitted to, and of the text that decides.
        evidence: its C is taken from `halves`.
    """
    fit = merged(*halves)
    free = _free(one, fit)
    evidence = replace(evidence, C=free.C)
    if not settings.compensate:
        found = masked(one, units, evidence, settings)
        error = fit.error(one.W, found.W)
        errors = {"masked": held.error(one.W, found.W), "fitted": error, "predicted": error}
        return _measured(one, found, fit, held, errors)
    target = _target(one, fit, free, held, settings)
    there = chosen(one.name, one.W, target.W, evidence, units, settings)
    columns = _columns(there, one.W)
    mask = one.W.masked_fill(~columns, 0.0)
    nothing = _Candidate(mask, None, None, held.error(one.W, mask))
    candidates = [nothing]
    for a in settings.ridges if not units.all_stay else (None,):
        W = target.W if a is None else compensated(target.W, free.C, columns, ridge(free.C, a))
        shift = None if one.bias is None else shift_of(one.W, W, fit, target.rho)
        candidates.append(_Candidate(W, shift, a, held.error(one.W, W, shift)))
    best = min(candidates, key=lambda candidate: candidate.error)
    found = _rounded(one, best, there, mask)
    error = fit.error(one.W, best.W, best.shift)
    errors = {"masked": nothing.error, "fitted": error, "predicted": error + _unseen_drift(one, fit, held)}
    if best is nothing:
        found = replace(found, notes=() if units.all_stay else (MASK_ONLY,))
    else:
        errors["predicted"] += _optimism(one, target, best, columns, halves)
        found = replace(found, facts={"ridge": best.a, "drift_ridge": target.share, "residual_share": target.rho})
    return _measured(one, found, fit, held, errors)


MASK_ONLY = "no fit was better on held-out text than the remaining weights as they were"


def _columns(there: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """bool [in] from bool [units]."""
    return there.repeat_interleave(W.shape[1] // len(there))


def _free(one: Projection, statistics: Statistics) -> Statistics:
    """What weights are fitted to where a bias, if there is one, is fitted too."""
    return statistics if one.bias is None else statistics.centred()


def _target(one: Projection, fit: Statistics, free: Statistics, held: Statistics, settings: PruneSettings) -> _Target:
    """The correction of the drift that is best on held-out text; `free` is `fit`, centred where there is a bias."""
    best, least = _Target(one.W), held.missing_energy
    for share in settings.drift_ridges:
        inner, residual = corrections(free, share)
        rhos = settings.residual_shares if residual is not None else (0.0,)
        for rho, error in zip(rhos, _drift_errors(one, inner, residual, rhos, fit, held), strict=True):
            if error < least:
                W = one.W + inner if residual is None else one.W + inner + rho * residual
                best, least = _Target(W, rho, share), error
    return best


def _drift_errors(
    one: Projection,
    inner: torch.Tensor,
    residual: torch.Tensor | None,
    rhos: Sequence[float],
    fit: Statistics,
    held: Statistics,
) -> list[float]:
    """Held-out error with W + inner + rho residual, for every rho: quadratic in it, so two products do for all."""
    A, B = inner, torch.zeros_like(inner) if residual is None else residual
    AC, BC, M = A @ held.C, B @ held.C, held.missing
    aa, ab, bb = (float((left * right).sum()) for left, right in ((AC, A), (AC, B), (BC, B)))
    am, bm = float((A * M).sum()), float((B * M).sum())
    errors = []
    for rho in rhos:
        error = held.missing_energy + aa + 2 * rho * ab + rho * rho * bb - 2 * (am + rho * bm)
        if one.bias is not None:
            D = A + rho * B
            shift = fit.mean_lag + rho * fit.mean_drift - D @ fit.mean_input
            error += float(shift @ shift - 2 * shift @ (held.mean_lag + held.mean_drift - D @ held.mean_input))
        errors.append(error)
    return errors


def _unseen_drift(one: Projection, fit: Statistics, held: Statistics) -> float:
    """By how much more drift arrives here on other text, which earlier projections were not fitted to.

    It is known before anything is fitted here. The part that is more is taken to be what the inputs tell nothing of.
    """
    energies = [statistics.output_energy(one.W) or 1.0 for statistics in (fit, held)]
    return held.missing_energy / energies[1] * energies[0] - fit.missing_energy


def _optimism(
    one: Projection, target: _Target, best: _Candidate, columns: torch.Tensor, halves: tuple[Statistics, Statistics]
) -> float:
    """By how much more the fit errs on other text than on its own.

    It is as the number of unknowns over that of tokens (Akaike 1969), and tokens of one text are worth less than
    independent ones. So each half is fitted alone: what it errs more on the other half is twice what is asked for.
    """
    excess = 0.0
    for own, other in (halves, halves[::-1]):
        if not own.tokens or not other.tokens:
            return 0.0
        free, W = _free(one, own), one.W
        if target.share is not None:
            inner, residual = corrections(free, target.share)
            W = W + inner if residual is None else W + inner + target.rho * residual
        if best.a is not None:
            W = compensated(W, free.C, columns, ridge(free.C, best.a))
        shift = None if one.bias is None else shift_of(one.W, W, own, target.rho)
        excess += (other.error(one.W, W, shift) - own.error(one.W, W, shift)) / 2
    return excess / 2


def _rounded(one: Projection, best: _Candidate, there: torch.Tensor, mask: torch.Tensor) -> Fitted:
    """What is stored of a candidate."""
    W, bias = best.W.to(one.dtype).double(), one.bias
    if bias is not None and best.shift is not None:
        bias = (bias + best.shift).to(one.bias_dtype).double()
    same = torch.equal(W, mask) and (bias is None or one.bias is None or torch.equal(bias, one.bias))
    return Fitted(W, bias, there, moved=not same, facts={"ridge": best.a})


def _measured(one: Projection, found: Fitted, fit: Statistics, held: Statistics, errors: Mapping[str, float]) -> Fitted:
    """With errors relative to the energy of the output; `measured` is that of what is stored."""
    shift = None if found.bias is None or one.bias is None else found.bias - one.bias
    energies = {"masked": held, "measured": held, "fitted": fit, "predicted": fit}
    absolute = {**errors, "measured": held.error(one.W, found.W, shift)}
    relative = {
        f"error_{name}": error / (energies[name].output_energy(one.W) or 1.0) for name, error in absolute.items()
    }
    return replace(found, facts={**found.facts, **relative})
