"""The loss of removing units, against quadratics that are solved anew for every set of columns."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from compress.prune.importance import (
    by_score,
    columns,
    greedy,
    in_metric,
    removed,
    restored,
    saliencies,
    swapped,
    whole,
)


def problem(width: int, out: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """W [out, width] and a C~ with correlated columns of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(out, width, generator=generator, dtype=torch.float64)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    X = torch.randn(200, width, generator=generator, dtype=torch.float64) @ mix
    return W, X.T @ X / len(X) + 0.01 * torch.eye(width, dtype=torch.float64)


def refit(W: torch.Tensor, C: torch.Tensor, S: list[int]) -> tuple[torch.Tensor, float]:
    """The best weights on columns S, and the objective there: normal equations, solved from nothing."""
    best = torch.zeros_like(W)
    if S:
        best[:, S] = torch.linalg.solve(C[S][:, S], (W @ C)[:, S].T).T
    D = W - best
    return best, float(torch.einsum("oi,ij,oj->", D, C, D))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_saliency_is_what_removal_costs(size):
    W, C = problem(6)
    eps = saliencies(whole(W, C, size))
    for unit in range(6 // size):
        rest = [column for column in range(6) if column // size != unit]
        assert float(eps[unit]) == pytest.approx(refit(W, C, rest)[1], rel=1e-10)


@pytest.mark.parametrize("size", [1, 2])
def test_downdates_are_a_fresh_solve(size):
    W, C = problem(8)
    fit = whole(W, C, size)
    for units in ([2], [0, 3]):
        fit = removed(fit, torch.tensor(units))
    S = columns(fit.there.nonzero()[:, 0], size)
    gone = ~torch.zeros(8, dtype=torch.bool).index_fill(0, S, True)
    assert torch.allclose(fit.B[S][:, S], torch.linalg.inv(C[S][:, S]), rtol=1e-10, atol=1e-12)
    assert torch.allclose(fit.W, refit(W, C, S.tolist())[0], rtol=1e-9, atol=1e-11)
    assert not fit.B[gone].any()
    assert not fit.B[:, gone].any()
    assert not fit.W[:, gone].any()
    base = refit(W, C, S.tolist())[1]
    for unit, eps in enumerate(saliencies(fit).tolist()):
        rest = [column for column in S.tolist() if column // size != unit]
        assert eps == (pytest.approx(refit(W, C, rest)[1] - base, rel=1e-9) if fit.there[unit] else torch.inf)


@pytest.mark.parametrize("size", [1, 2])
def test_what_comes_back_is_the_fit_with_it(size):
    W, C = problem(8)
    some = removed(whole(W, C, size), torch.tensor([0, 2, 3]))
    back, gain = restored(some, W, C, torch.tensor([0, 3]))
    expected = removed(whole(W, C, size), torch.tensor([2]))
    assert torch.equal(back.there, expected.there)
    assert torch.allclose(back.W, expected.W, rtol=1e-9, atol=1e-11)
    assert torch.allclose(back.B, expected.B, rtol=1e-9, atol=1e-11)
    objectives = [refit(W, C, columns(fit.there.nonzero()[:, 0], size).tolist())[1] for fit in (some, back)]
    assert float(gain) == pytest.approx(objectives[0] - objectives[1], rel=1e-9)


def objective(W: torch.Tensor, C: torch.Tensor, there: torch.Tensor) -> float:
    return refit(W, C, columns(there.nonzero()[:, 0], W.shape[1] // len(there)).tolist())[1]


@pytest.mark.parametrize("keep", [2, 3, 4])
def test_greedy_and_exchanges_come_next_to_the_best_of_all_subsets(keep):
    found, greedily, best = 0.0, 0.0, 0.0
    for seed in range(12):
        W, C = problem(6, seed=seed)
        first = greedy(whole(W, C, 1), keep)
        last = swapped(first, W, C)
        assert int(last.there.sum()) == keep
        greedily += objective(W, C, first.there)
        found += objective(W, C, last.there)
        best += min(refit(W, C, list(S))[1] for S in combinations(range(6), keep))
        assert objective(W, C, last.there) <= objective(W, C, first.there) * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found <= 1.06 * best
    assert found <= greedily


def test_no_single_exchange_is_left_that_helps():
    W, C = problem(12)
    last = swapped(greedy(whole(W, C, 1), 6, step=3), W, C, count=3, rounds=50)
    S = last.there.nonzero()[:, 0].tolist()
    reached = refit(W, C, S)[1]
    best = max(
        (column for column in range(12) if column not in S), key=lambda column: -refit(W, C, sorted([*S, column]))[1]
    )
    larger = sorted([*S, best])
    assert all(refit(W, C, [c for c in larger if c != gone])[1] >= reached * (1 - 1e-9) for gone in S)


def test_every_group_loses_the_same_number():
    W, C = problem(24, seed=3)
    start = whole(W, C, 2)  # 12 heads of 2 columns in 3 groups
    first = greedy(start, 6, groups=3)
    last = swapped(first, W, C, groups=3)
    for fit in (first, last):
        assert fit.there.reshape(3, 4).sum(1).tolist() == [2, 2, 2]
    assert objective(W, C, last.there) <= objective(W, C, first.there) * (1 + 1e-9)


def test_a_metric_of_the_outputs_weighs_them():
    W, C = problem(6)
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    G = root @ root.T
    eps = saliencies(whole(in_metric(W, G), C, 2))
    for unit in range(3):
        rest = [column for column in range(6) if column // 2 != unit]
        D = W - refit(W, C, rest)[0]  # the best fit does not depend on the metric
        assert float(eps[unit]) == pytest.approx(float(torch.einsum("ab,ai,ij,bj->", G, D, C, D)), rel=1e-8)


def test_scores_keep_the_highest_of_every_group():
    scores = torch.tensor([3.0, 1.0, 2.0, 2.0, 9.0, 8.0])
    assert by_score(scores, 3).nonzero()[:, 0].tolist() == [0, 4, 5]
    assert by_score(scores, 4, groups=2).nonzero()[:, 0].tolist() == [0, 2, 4, 5]
    assert by_score(torch.ones(4), 2).nonzero()[:, 0].tolist() == [0, 1]
