"""Sums over tokens and the errors told from them, against the tokens themselves."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from compress.prune.statistics import ROWS, Accumulator, Statistics, merged, token_weights

IN, OUT = 6, 4


def window(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, IN, generator=generator) + 0.5
    return x + 0.3 * torch.randn(count, IN, generator=generator), x, torch.randn(count, OUT, generator=generator)


def weight(seed: int = 7) -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(seed))


def added(lengths: list[int], *, residual: bool = True, weights: bool = False) -> tuple[Statistics, torch.Tensor]:
    """Statistics of some windows, and the token weights."""
    sums, all_weights = Accumulator(weight(), residual=residual), []
    for seed, count in enumerate(lengths):
        here, there, drift = window(count, seed)
        w = torch.rand(count, generator=torch.Generator().manual_seed(100 + seed)) + 0.1
        sums.add(here, there, drift if residual else None, w if weights else None)
        all_weights.append(w if weights else torch.ones(count))
    return sums.mean(), torch.cat(all_weights).double()


def every_token(lengths: list[int]) -> list[torch.Tensor]:
    """x^, x and r - r^ of all of them, float64."""
    parts = zip(*(window(count, seed) for seed, count in enumerate(lengths)), strict=True)
    return [torch.cat(part).double() for part in parts]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_errors_are_those_of_the_tokens(residual, weights):
    lengths = [40, 7, ROWS, 300]
    found, w = added(lengths, residual=residual, weights=weights)
    here, there, drift = every_token(lengths)
    W, changed = weight().double(), weight(8).double()
    shift = torch.tensor([0.3, -0.2, 0.0, 1.0], dtype=torch.float64)
    y = there @ W.T + (drift if residual else 0)

    def mean(values: torch.Tensor) -> float:
        return float((w * values.pow(2).sum(1)).sum() / w.sum())

    assert found.error(W, changed) == pytest.approx(mean(y - here @ changed.T), rel=1e-5)
    assert found.error(W, changed, shift) == pytest.approx(mean(y - here @ changed.T - shift), rel=1e-5)
    assert found.output_energy(W) == pytest.approx(mean(there @ W.T), rel=1e-5)
    assert found.tokens == sum(lengths)
    assert found.weight == pytest.approx(float(w.sum()), rel=1e-5)


def test_centred_moments_are_covariances():
    found, _ = added([500])
    here, there, drift = every_token([500])
    away = here - here.mean(0)
    free = found.centred()
    assert free.drift is not None
    assert torch.allclose(free.C, away.T @ away / 500, atol=1e-5)
    assert torch.allclose(free.drift, drift.T @ away / 500, atol=1e-5)
    assert torch.allclose(free.lag, ((there - here) @ weight().double().T).T @ away / 500, atol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_two_parts_together_are_the_whole(residual):
    whole, _ = added([30, 50], residual=residual)
    sums = [Accumulator(weight(), residual=residual) for _ in range(2)]
    for seed, (one, count) in enumerate(zip(sums, (30, 50), strict=True)):
        here, there, drift = window(count, seed)
        one.add(here, there, drift if residual else None)
    together = merged(*(one.mean() for one in sums))
    for field in fields(Statistics):
        left, right = getattr(whole, field.name), getattr(together, field.name)
        if isinstance(left, torch.Tensor):
            assert torch.allclose(left, right, atol=1e-6)
        elif left is None:
            assert right is None
        else:
            assert left == pytest.approx(right, rel=1e-6)


def test_nothing_added_is_nothing():
    empty = Accumulator(weight(), residual=True).mean()
    some, _ = added([30])
    assert empty.tokens == 0
    together = merged(some, empty)
    assert torch.equal(together.C, some.C)
    assert together.weight == some.weight


def test_numbers_that_are_not_finite_are_seen():
    found, _ = added([30])
    assert found.finite
    sums = Accumulator(weight(), residual=False)
    here, there, _ = window(30, 0)
    here[3, 2] = torch.nan
    sums.add(here, there)
    assert not sums.mean().finite


def test_behind_a_norm_outputs_of_all_sizes_count_alike():
    y = torch.tensor([[1.0, 1.0], [2.0, 2.0], [2.0, -2.0], [0.0, 0.0]])
    assert token_weights(y).tolist() == pytest.approx([1, 0.25, 0.25, 2.5])
