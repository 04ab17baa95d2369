"""The closed-form weights, against least squares over the tokens themselves."""

from __future__ import annotations

import pytest
import torch

from compress.prune.compensate import compensated, corrections, ridge, shift_of
from compress.prune.statistics import Accumulator, Statistics

TOKENS, IN, OUT = 60, 8, 5


def tokens(count: int = TOKENS, seed: int = 0) -> dict[str, torch.Tensor]:
    """W, and for every token x, x^ and r - r^; inputs have a mean."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(IN, IN, generator=generator)
    x = torch.randn(count, IN, generator=generator) @ mix + 1.0
    return {
        "W": torch.randn(OUT, IN, generator=generator),
        "x": x,
        "pruned": x + 0.3 * torch.randn(count, IN, generator=generator) - 0.2,
        "drift": 0.5 * torch.randn(count, OUT, generator=generator) + 0.1,
    }


def statistics(some: dict[str, torch.Tensor], *, residual: bool = True) -> Statistics:
    sums = Accumulator(some["W"], residual=residual)
    sums.add(some["pruned"], some["x"], some["drift"] if residual else None)
    return sums.mean()


def solve_by_rows(A: torch.Tensor, Y: torch.Tensor, towards: torch.Tensor, added: float) -> torch.Tensor:
    """argmin over V of mean ||y - V a||^2 + added ||V - towards||^2, as one least-squares problem with more rows."""
    n, width = A.shape
    more = (added * n) ** 0.5 * torch.eye(width, dtype=A.dtype)
    return torch.linalg.lstsq(torch.cat([A, more]), torch.cat([Y, more @ towards.T])).solution.T


@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0])
def test_the_target_is_the_ridge_solution_towards_the_original_weight(rho):
    some = tokens()
    moments = statistics(some)
    inner, residual = corrections(moments, 0.3)
    assert residual is not None
    W, x, pruned, drift = (some[name].double() for name in ("W", "x", "pruned", "drift"))
    expected_target = solve_by_rows(pruned, x @ W.T + rho * drift, W, ridge(moments.C, 0.3))
    assert torch.allclose(W + inner + rho * residual, expected_target, atol=1e-5)


def test_without_a_residual_only_the_inputs_lag_is_corrected():
    some = tokens()
    inner, residual = corrections(statistics(some, residual=False), 0.3)
    assert residual is None
    assert torch.allclose(inner, corrections(statistics(some), 0.3)[0], atol=1e-10)


@pytest.mark.parametrize("share", [1e-4, 1e-1])
def test_what_stays_is_the_ridge_solution_shrunk_towards_the_target(share):
    some = tokens()
    moments = statistics(some)
    W, pruned = some["W"].double(), some["pruned"].double()
    there = torch.tensor([True, False, True, True, False, True, False, True])
    added = ridge(moments.C, share)
    changed = compensated(W, moments.C, there, added)
    assert not changed[:, ~there].any()
    assert torch.allclose(
        changed[:, there], solve_by_rows(pruned[:, there], pruned @ W.T, W[:, there], added), atol=1e-4
    )


def test_with_a_bias_it_is_the_fit_of_weight_and_bias_together():
    some = tokens()
    moments = statistics(some)
    W, x, pruned, drift = (some[name].double() for name in ("W", "x", "pruned", "drift"))
    free = moments.centred()
    inner, residual = corrections(free, 1e-9)
    assert residual is not None
    there = torch.tensor([True, True, False, True, False, True, True, True])
    changed = compensated(W + inner + residual, free.C, there, ridge(free.C, 1e-9))
    shift = shift_of(W, changed, moments, 1.0)
    A = torch.cat([pruned[:, there], torch.ones(TOKENS, 1, dtype=torch.float64)], dim=1)
    both = torch.linalg.lstsq(A, x @ W.T + drift).solution.T
    assert torch.allclose(changed[:, there], both[:, :-1], atol=1e-4)
    assert torch.allclose(shift, both[:, -1], atol=1e-4)


def test_inputs_that_are_always_zero_change_nothing():
    W = torch.ones(2, 4, dtype=torch.float64)
    C = torch.zeros(4, 4, dtype=torch.float64)
    changed = compensated(W, C, torch.tensor([True, True, False, False]), ridge(C, 0.1))
    assert torch.equal(changed, torch.tensor([[1.0, 1, 0, 0]] * 2, dtype=torch.float64))
