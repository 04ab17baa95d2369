"""The ratio of two paired times: Hodges and Lehmann's median with the exact interval of the signed-rank test.

The estimate is the median of all Walsh averages (r_i + r_j) / 2, i <= j, of the rounds' log ratios; its interval runs
from the (t + 1)-th smallest to the (t + 1)-th largest of them, where t is the largest number with P[T <= t] <= tail and
T is Wilcoxon's signed-rank statistic (Hodges and Lehmann, "Estimates of location based on rank tests", 1963; Hollander
and Wolfe, "Nonparametric statistical methods", section 3.3). It is exact for every symmetric distribution, which log
ratios of equal things have, needs no random numbers, and a spike moves one rank. Where neighbouring rounds resemble
each other, T is that of as many rounds as they are worth. Pure numpy and scipy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import scipy.stats

from compress.measure.latency.independence import independent_count
from compress.measure.statistics import Estimate, FloatArray
from compress.records import Interval

RANKS_FROM_ROUNDS = 10
"""Fewer rounds have too few ranks for high levels, and an interval of Student's t."""
MOST_ROUNDS = 512
"""More rounds than this are first reduced to medians of consecutive rounds: Walsh averages grow with n^2."""


def paired_ratio(
    log_ratios: FloatArray,
    *,
    levels: Sequence[float] = (0.95,),
    level: float = 0.95,
    independent: int | None = None,
) -> Estimate:
    """exp of the Hodges-Lehmann median of the rounds' log ratios ln(t_B / t_A).

    Args:
        log_ratios: [rounds] in the order they were measured.
        independent: how many independent rounds they are worth; None finds out.
        levels: confidence of the one-sided bounds; level: of the two-sided interval. One that so few rounds cannot
            carry is absent.
    """
    r = _consecutive_medians(log_ratios, MOST_ROUNDS)
    first, second = np.triu_indices(len(r))
    walsh = np.sort((r[first] + r[second]) / 2)
    value = float(np.median(walsh))
    if len(r) < 2:
        return Estimate(value).map(math.exp)
    if len(r) < RANKS_FROM_ROUNDS:
        return _student(r, value, levels, level).map(math.exp)

    worth = max(RANKS_FROM_ROUNDS, independent_count(r) if independent is None else independent)

    def bounds(one_sided: float) -> tuple[float, float] | None:
        rank = _signed_rank(worth, 1 - one_sided)
        if rank is None:
            return None
        # The same share of the Walsh averages as it is of those of `worth` rounds; the rank itself where they are all.
        at = int((rank + 0.5) / _pairs(worth) * len(walsh))
        return float(walsh[at]), float(walsh[-1 - at])

    both = bounds((1 + level) / 2)
    words = f"{len(r)} rounds" + (f", worth {worth} independent ones" if worth < len(r) else "")
    interval = None if both is None else Interval(*both, level, f"Hodges-Lehmann, signed ranks, {words}")
    one_sided = {one: found for one in levels if (found := bounds(one)) is not None}
    return Estimate(value, interval, one_sided).map(math.exp)


def _student(r: FloatArray, value: float, levels: Sequence[float], level: float) -> Estimate:
    n = len(r)
    error = float(r.std(ddof=1)) / math.sqrt(n)

    def bounds(one_sided: float) -> tuple[float, float]:
        half_width = float(scipy.stats.t.ppf(one_sided, n - 1)) * error
        return value - half_width, value + half_width

    interval = Interval(*bounds((1 + level) / 2), level, f"Hodges-Lehmann, t, {n} rounds")
    return Estimate(value, interval, {one: bounds(one) for one in levels})


def _pairs(n: int) -> int:
    """Walsh averages of n rounds."""
    return n * (n + 1) // 2


def _signed_rank(n: int, tail: float) -> int | None:
    """The largest t with P[T <= t] <= tail for n rounds; None where even t = 0 is likelier."""
    # A hair is added, as 1 - 0.95 is a little less than the 0.05 that was meant.
    t = int(np.searchsorted(_signed_rank_shares(n), tail + 1e-12, side="right")) - 1
    return None if t < 0 else t


@functools.lru_cache(maxsize=8)
def _signed_rank_shares(n: int) -> FloatArray:
    """P[T <= t] for t = 0..n (n + 1) / 2: each rank 1..n is in the sum T or not, with chance 1/2."""
    chances = np.ones(1)
    for rank in range(1, n + 1):
        longer = np.zeros(len(chances) + rank)
        longer[: len(chances)] += chances / 2
        longer[rank:] += chances / 2
        chances = longer
    return np.cumsum(chances)


def _consecutive_medians(values: FloatArray, at_most: int) -> FloatArray:
    """Medians of about equally long runs of neighbours, when there are more than `at_most` values."""
    if len(values) <= at_most:
        return values
    return np.array([np.median(part) for part in np.array_split(values, at_most)])
