"""How many independent values a series of measurements is worth, and quantiles that know it.

A machine that is slow stays slow for a while, so neighbouring samples resemble each other and a hundred of them are
worth less than a hundred. The count is n / tau with tau = 1 + 2 sum rho_k, the integrated autocorrelation time, summed
while consecutive pairs stay positive (Geyer, "Practical Markov chain Monte Carlo", 1992, section 3.3), of the values'
ranks, which no spike dominates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import scipy.stats

from compress.measure.statistics import Estimate, order_statistic_quantile

FloatArray = npt.NDArray[np.float64]


def independent_count(values: FloatArray) -> int:
    """1..n for [n] values in the order they were measured."""
    n = len(values)
    if n < 4:
        return n
    ranks = scipy.stats.rankdata(values) - (n + 1) / 2
    power = float(ranks @ ranks)
    if power == 0:  # all are equal: there is nothing that could be correlated
        return n
    rho = np.correlate(ranks, ranks, mode="full")[n - 1 :] / power  # [n]
    pairs = rho[: n // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    tau = -1 + 2 * float(pairs[: ends[0] if len(ends) else len(pairs)].sum())
    return max(1, min(n, int(n / max(tau, 1.0))))


def dependent_quantile(
    values: FloatArray, q: float, independent: int, *, levels: Sequence[float] = (0.95,), level: float = 0.95
) -> Estimate:
    """Quantile `q` (0..1) of all values, with the bounds that `independent` of them would give.

    The bounds are order statistics of as many values, read off at the same shares of all values; with
    independent = n they are those of `order_statistic_quantile`.
    """
    ranked, n = np.sort(values), len(values)
    rank = np.arange(independent, dtype=np.float64)
    bounds = order_statistic_quantile(rank, q, levels=levels, level=level).map(
        lambda at: float(ranked[int((at + 0.5) * n / independent)])
    )
    interval = bounds.interval
    if interval is not None:
        worth = f"worth {independent} independent ones" if independent < n else "independent"
        interval = dataclasses.replace(interval, method=f"order statistics, {n} values, {worth}")
    return Estimate(float(np.quantile(values, q)), interval, bounds.one_sided)
