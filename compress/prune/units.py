"""Which units of one projection stay, by each kind of importance."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from compress.model.prunable import Unit
from compress.model.shapes import Shape
from compress.prune.compensate import damped, ridge
from compress.prune.gradients import taylor_scores
from compress.prune.importance import Fit, by_score, columns, greedy, in_metric, swapped, whole
from compress.prune.settings import PruneSettings


@dataclass(frozen=True)
class Units:
    """The units of an output projection: equal runs of its columns.

    Attributes:
        of, keep: how many there are, and how many stay.
        groups, keep_groups: the units are in so many equal runs, of which so many stay, each with as many units.
    """

    unit: Unit
    of: int
    keep: int
    groups: int = 1
    keep_groups: int = 1

    @property
    def all_stay(self) -> bool:
        return self.keep == self.of


@dataclass(frozen=True)
class Evidence:
    """What speaks for the units of one projection beside its weight.

    Attributes:
        C: float64 [in, in], second moments or covariance of its inputs; None without text.
        fisher: float32 [out, out], metric of its outputs; None for the identity.
        taylor: float64 [windows, in], see `gradients.Gradients`; None without.
    """

    C: torch.Tensor | None
    fisher: torch.Tensor | None
    taylor: torch.Tensor | None


def channels(before: Shape, after: Shape) -> Units:
    return Units("ffn", before.ffn, after.ffn)


def heads(before: Shape, after: Shape) -> Units:
    """Whole key and value heads where every one that stays keeps its query heads; otherwise query heads."""
    grouped = before.kv_heads < before.heads
    if grouped and after.kv_heads < before.kv_heads and after.heads * before.kv_heads == before.heads * after.kv_heads:
        return Units("kv_heads", before.kv_heads, after.kv_heads)
    groups = (before.kv_heads, after.kv_heads) if grouped else (1, 1)
    return Units("heads", before.heads, after.heads, *groups)


def chosen(
    name: str, W: torch.Tensor, target: torch.Tensor, evidence: Evidence, units: Units, settings: PruneSettings
) -> torch.Tensor:
    """bool [units.of]: which units stay.

    Args:
        name: of the projection; `random` starts from it.
        W, target: float64 [out, in], the original weight and what `obs` is to come closest to.
    """
    if units.all_stay:
        return torch.ones(units.of, dtype=torch.bool, device=W.device)
    if settings.importance == "obs":
        assert evidence.C is not None
        weighted = target if evidence.fisher is None else in_metric(target, evidence.fisher.to(target.device))
        return _by_loss(weighted, evidence.C, units, settings)
    scores = _scores(name, W, evidence, units, settings)
    stay = by_score(scores.reshape(units.groups, -1).sum(1), units.keep_groups)
    inner = by_score(scores.reshape(units.groups, -1)[stay].reshape(-1), units.keep, groups=units.keep_groups)
    return _spread(stay, inner, units)


def _spread(stay: torch.Tensor, inner: torch.Tensor, units: Units) -> torch.Tensor:
    """bool [units.of] from what stays of the groups, and of the units in those."""
    there = torch.zeros(units.groups, units.of // units.groups, dtype=torch.bool, device=stay.device)
    there[stay] = inner.reshape(units.keep_groups, -1)
    return there.reshape(-1)


def _by_loss(W: torch.Tensor, C: torch.Tensor, units: Units, settings: PruneSettings) -> torch.Tensor:
    """Greedy removal and exchanges, of whole groups first, then inside those that stay.

    The output of dead inputs is zero whatever their weights: without these they go first and cost nothing.
    """
    W = W.masked_fill(C.diagonal() <= 0, 0.0)
    C = damped(C, ridge(C, settings.selection_ridge))
    size = W.shape[1] // units.groups
    fit = whole(W, C, size if units.groups > 1 else W.shape[1] // units.of)
    step = max(1, units.of // settings.steps)
    if units.groups == 1:
        return swapped(greedy(fit, units.keep, step=step), W, C, count=step, rounds=settings.swaps).there
    fit = swapped(greedy(fit, units.keep_groups), W, C, rounds=settings.swaps)
    S = columns(fit.there.nonzero()[:, 0], size)
    W, C, left = fit.W[:, S], C[S][:, S], units.of // units.groups * units.keep_groups
    inner = Fit(W, fit.B[S][:, S], torch.ones(left, dtype=torch.bool, device=W.device))
    inner = greedy(inner, units.keep, groups=units.keep_groups)
    inner = swapped(inner, W, C, groups=units.keep_groups, rounds=settings.swaps)
    return _spread(fit.there, inner.there, units)


def _scores(name: str, W: torch.Tensor, evidence: Evidence, units: Units, settings: PruneSettings) -> torch.Tensor:
    """float64 [units.of]; the squared weights are those of the output projection alone."""
    if settings.importance == "random":
        digest = hashlib.sha256(f"{settings.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
        return torch.rand(units.of, generator=generator, dtype=torch.float64).to(W.device)
    if settings.importance == "taylor":
        assert evidence.taylor is not None
        return taylor_scores(evidence.taylor, units.of).to(W.device)
    squares = W.pow(2).sum(0)
    if settings.importance == "activation":
        assert evidence.C is not None
        squares = squares * evidence.C.diagonal()
    return squares.reshape(units.of, -1).sum(1)
