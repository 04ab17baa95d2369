"""Statistics of two models that answered the same items: the test, the interval of the drop, the cluster bootstrap.

With b items that only the original answers right (losses), c that only the result does (gains), n in all:

    p = P[Bin(b + c, 1/2) >= b]                                    exact McNemar test, one-sided
    D = (b - c) / n                                                drop
    D in {d : |b - c - n d| <= z sqrt(n (2 q(d) + d (1 - d)))}     score interval of the drop, q(d) the estimate of the
                                                                   share of gains under D = d

The interval is Tango's (Statistics in Medicine 17, 1998, equations 7 to 13). It has a width even where nothing flips:
0 flips of n leave a drop of z^2 / (n + z^2) possible. A one-sided 95 % bound covers 92 to 97 % (tests simulate it).

Items of one cluster (questions on one passage) are not independent: whole clusters are resampled, inside each task
(Miller, "Adding error bars to evals", 2024, section 2.2). Resampling a handful of flips shows too little spread, so the
bounds are never narrower than the score interval of n / deff items, deff being the resampled variance over that of
independent items (Korn and Graubard, Survey Methodology 24, 1998, for shares).

Pure numpy and scipy.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import scipy.stats

from compress.measure.statistics import MEAN_DRAWS, Estimate, FloatArray, IntArray, bounded, resamples
from compress.records import Interval


@dataclass(frozen=True)
class Clusters:
    """Which items belong together, and which clusters to one task.

    Attributes:
        ids: [N] cluster of each item, 0..K-1.
        strata: [K] task of each cluster, 0..T-1; every task keeps its number of clusters when they are resampled.
    """

    ids: IntArray
    strata: IntArray

    @property
    def count(self) -> int:
        return len(self.strata)

    @property
    def fewest(self) -> int:
        """Clusters of the task that has the fewest."""
        return int(np.bincount(self.strata).min())

    @property
    def independent(self) -> bool:
        """Whether every item stands alone and all are of one task: then counting is enough."""
        return self.count == len(self.ids) and not self.strata.any()

    @property
    def words(self) -> str:
        tasks = int(self.strata.max()) + 1
        what = "items" if self.count == len(self.ids) else "clusters"
        return f"{self.count} {what}" + (f" in {tasks} tasks" if tasks > 1 else "")


def cluster(names: Sequence[tuple[int, Hashable]]) -> Clusters:
    """Clusters from the (task, name) of each item; tasks are numbered from 0."""
    found: dict[tuple[int, Hashable], int] = {}
    ids = [found.setdefault(name, len(found)) for name in names]
    return Clusters(np.array(ids, dtype=np.int64), np.array([task for task, _ in found], dtype=np.int64))


def resampled_sums(columns: FloatArray, clusters: Clusters, rng: np.random.Generator) -> FloatArray:
    """Sums of columns [N, m] over MEAN_DRAWS resamples of whole clusters, [MEAN_DRAWS, m]."""
    sums = np.stack(
        [np.bincount(clusters.ids, weights=column, minlength=clusters.count) for column in columns.T], axis=1
    )  # [K, m]
    found = np.zeros((MEAN_DRAWS, columns.shape[1]))
    for stratum in range(int(clusters.strata.max()) + 1):
        members = sums[clusters.strata == stratum]  # [k, m]
        parts = [weights @ members for weights in resamples(rng, len(members), MEAN_DRAWS, len(members))]
        found += np.concatenate(parts)
    return found


def mcnemar_p(losses: int, gains: int) -> float:
    """Chance of so many losses or more among the flips if neither model were better; 1 without flips."""
    if losses + gains == 0:
        return 1.0
    return float(scipy.stats.binomtest(losses, losses + gains, 0.5, alternative="greater").pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values, adjusted for their number (Holm, 1979): a task below 0.05 has lost in spite of so many looks."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def score_drop(
    losses: float, gains: float, count: float, *, levels: Sequence[float] = (0.95,), level: float = 0.95
) -> Estimate:
    """The drop, -1..1, with Tango's score interval; counts may be fractions (of effective items)."""

    def bounds(one_sided: float) -> tuple[float, float]:
        z = float(scipy.stats.norm.ppf(one_sided))
        return -_score_upper(gains, losses, count, z), _score_upper(losses, gains, count, z)

    return bounded((losses - gains) / count, bounds, levels, level, f"Tango's paired score interval, {count:g} items")


def constant_mean(
    value: float, least: float, most: float, count: int, *, levels: Sequence[float] = (0.95,), level: float = 0.95
) -> Estimate:
    """A mean of items that all have the same value: where none of `count` differs, a share of up to
    1 - (1 - level)^(1 / count) may, each by as much as the range `least`..`most` allows."""

    def bounds(one_sided: float) -> tuple[float, float]:
        unseen = 1 - (1 - one_sided) ** (1 / count)
        return value - unseen * (value - least), value + unseen * (most - value)

    return bounded(value, bounds, levels, level, f"none of {count} differs")


def no_narrower(estimate: Estimate, floor: Estimate) -> Estimate:
    """`estimate` with bounds that contain those of `floor`."""
    if estimate.interval is None or floor.interval is None:
        return estimate
    wide, least = estimate.interval, floor.interval
    method = f"{wide.method}, no narrower than {least.method}"
    return Estimate(
        estimate.value,
        Interval(min(wide.low, least.low), max(wide.high, least.high), wide.level, method),
        {
            one: (min(low, floor.one_sided[one][0]), max(high, floor.one_sided[one][1]))
            for one, (low, high) in estimate.one_sided.items()
        },
    )


def _score_upper(b: float, c: float, n: float, z: float) -> float:
    """The d above (b - c) / n where Tango's statistic is -z; 1 where b is n."""
    if b >= n:
        return 1.0

    def statistic(d: float) -> float:
        linear = -b - c + (2 * n - b + c) * d
        q = (math.sqrt(max(0.0, linear**2 + 8 * n * c * d * (1 - d))) - linear) / (4 * n)
        variance = n * (2 * q + d * (1 - d))
        distance = b - c - n * d
        return distance + z * math.sqrt(max(0.0, variance))

    # Where no pair contradicts it the variance at the estimate is 0, which is a root but not the bound.
    return float(scipy.optimize.brentq(statistic, (b - c) / n + 1e-9, 1.0, xtol=1e-12))
