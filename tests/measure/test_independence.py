"""How many independent values correlated ones are worth."""

from __future__ import annotations

import numpy as np
import pytest

from compress.measure.latency.independence import dependent_quantile, independent_count
from compress.measure.statistics import order_statistic_quantile


def autoregressive(phi: float, n: int, seed: int) -> np.ndarray:
    """x_t = phi x_(t-1) + e_t, whose integrated autocorrelation time is (1 + phi) / (1 - phi)."""
    rng = np.random.default_rng(seed)
    values = np.empty(n)
    values[0] = rng.normal() / np.sqrt(1 - phi**2)
    for t in range(1, n):
        values[t] = phi * values[t - 1] + rng.normal()
    return values


@pytest.mark.parametrize(("phi", "tau"), [(0.0, 1.0), (0.5, 3.0), (0.8, 9.0)])
def test_the_count_follows_the_autocorrelation_time(phi: float, tau: float) -> None:
    n = 4000
    counts = [independent_count(autoregressive(phi, n, seed)) for seed in range(20)]
    assert np.median(counts) == pytest.approx(n / tau, rel=0.2)


def test_the_count_is_between_one_and_all() -> None:
    assert independent_count(np.arange(100.0)) <= 4  # a pure trend
    assert independent_count(np.ones(50)) == 50
    assert independent_count(np.tile([1.0, 2.0], 50)) == 100  # anticorrelated: never more than there are
    assert [independent_count(np.arange(float(n))) for n in (1, 2, 3)] == [1, 2, 3]


def test_no_spike_hides_the_correlation() -> None:
    values = autoregressive(0.8, 1000, 0)
    spiked = values.copy()
    spiked[500] = 1e6
    assert independent_count(spiked) == pytest.approx(independent_count(values), rel=0.1)


@pytest.mark.parametrize("q", [0.5, 0.9])
def test_all_independent_gives_the_plain_order_statistics(q: float) -> None:
    values = np.random.default_rng(0).normal(10, 1, 137)
    plain = order_statistic_quantile(values, q, levels=(0.9, 0.95))
    found = dependent_quantile(values, q, 137, levels=(0.9, 0.95))
    assert found.value == plain.value
    assert found.one_sided == plain.one_sided
    assert found.interval is not None
    assert plain.interval is not None
    assert (found.interval.low, found.interval.high) == (plain.interval.low, plain.interval.high)


def test_few_independent_values_widen_the_interval_and_too_few_have_none() -> None:
    values = np.random.default_rng(0).normal(10, 1, 200)
    widths = [(found.high - found.low) for n in (200, 50, 10) if (found := dependent_quantile(values, 0.5, n).interval)]
    assert widths == sorted(widths)
    assert len(widths) == 3
    assert dependent_quantile(values, 0.5, 4).interval is None
    assert "200 values, worth 50 independent" in dependent_quantile(values, 0.5, 50).interval.method


def test_the_median_of_correlated_values_is_covered_as_promised() -> None:
    """The plain interval misses the true median far more often than 5 times in 100; this one does not."""
    missed = {"plain": 0, "dependent": 0}
    for seed in range(200):
        values = autoregressive(0.7, 400, seed)
        for name, count in (("plain", 400), ("dependent", independent_count(values))):
            interval = dependent_quantile(values, 0.5, count).interval
            assert interval is not None
            missed[name] += not interval.low <= 0 <= interval.high
    assert missed["plain"] > 50
    assert missed["dependent"] <= 20
