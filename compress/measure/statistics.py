"""Estimates with honest intervals: block bootstrap and order statistics. Ratios of paired times: see `ratios`.

Pure numpy and scipy. Every estimate carries a two-sided interval and, for gates, one-sided bounds at the asked
levels. Where the data cannot carry a bound it is absent (interval None, level missing) instead of guessed.

Tokens of one text are not independent, so resampling draws whole blocks (windows, or runs of tokens of one).
Percentile bounds are widened for few blocks as in Hesterberg, "What Teachers Should Know about the Bootstrap"
(2015), section 5.3: the tail a becomes Phi(-sqrt(n / (n - 1)) t(1 - a, n - 1)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import scipy.special
import scipy.stats

from compress.records import Interval

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Bound = Callable[[float], tuple[float, float]]
"""Confidence of each side -> (lower, upper)."""

MEAN_DRAWS = 10_000
QUANTILE_DRAWS = 1_000
CHUNK = 4_000_000
"""Numbers held at once while resampling (32 MB)."""


@dataclass(frozen=True)
class Estimate:
    """A number and what is known about it.

    Attributes:
        interval: two-sided interval; None when there are too few blocks for one.
        one_sided: {level: (lower, upper)}; each bound alone holds with that confidence.
    """

    value: float
    interval: Interval | None = None
    one_sided: Mapping[float, tuple[float, float]] = field(default_factory=dict)

    def map(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of an increasing function of the number (exp, a change of unit)."""
        interval = self.interval
        if interval is not None:
            interval = Interval(function(interval.low), function(interval.high), interval.level, interval.method)
        bounds = {level: (function(low), function(high)) for level, (low, high) in self.one_sided.items()}
        return Estimate(function(self.value), interval, bounds)


def token_blocks(windows: IntArray, *, wanted: int = 32, shortest: int = 32) -> tuple[IntArray, str]:
    """Blocks for resampling tokens: the windows themselves, or runs of them where there are few windows.

    Args:
        windows: [N] the window of each token, tokens of one window adjacent.
        wanted: with fewer windows than this, each is cut into equal runs until about so many exist.
        shortest: no run is made shorter than this many tokens.

    Returns:
        blocks: [N] ids 0..B-1; what they are, in words for the interval's method.
    """
    _, starts, counts = np.unique(windows, return_index=True, return_counts=True)
    order = np.argsort(starts)
    blocks = np.empty(len(windows), dtype=np.int64)
    parts_wanted = math.ceil(wanted / max(len(starts), 1))
    first, runs = 0, 0
    for start, count in zip(starts[order], counts[order], strict=True):
        parts = max(1, min(parts_wanted, int(count) // shortest))
        blocks[start : start + count] = first + np.arange(count) * parts // count
        first, runs = first + parts, runs + (parts > 1)
    return blocks, f"{first} windows" if runs == 0 else f"{first} runs of tokens"


def block_mean(
    values: FloatArray,
    blocks: IntArray,
    *,
    rng: np.random.Generator,
    levels: Sequence[float] = (0.95,),
    level: float = 0.95,
    blocks_are: str = "blocks",
) -> Estimate:
    """Mean over tokens with a block bootstrap (MEAN_DRAWS resamples of whole blocks).

    Args:
        values: [N]; blocks: [N] ids 0..B-1, every id used.
        levels: confidence of the one-sided bounds; level: of the two-sided interval.
    """
    sums = np.bincount(blocks, weights=values)  # [B]
    counts = np.bincount(blocks).astype(np.float64)  # [B]
    draws = np.concatenate(
        [(weights @ sums) / (weights @ counts) for weights in resamples(rng, len(sums), MEAN_DRAWS, len(sums))]
    )  # [draws]
    value = float(values.mean())
    # Rounding in the resampled sums must not turn "all values are equal" into an interval beside the value.
    if bool((values == values[0]).all()):
        draws, value = np.full_like(draws, values[0]), float(values[0])
    return from_draws(value, draws, len(sums), levels, level, f"block bootstrap, {blocks_are}")


def ratio_of_sums(
    above: FloatArray,
    below: FloatArray,
    *,
    rng: np.random.Generator,
    levels: Sequence[float] = (0.95,),
    level: float = 0.95,
    items_are: str = "items",
) -> Estimate:
    """sum(above) / sum(below) with a bootstrap (MEAN_DRAWS) over items, in pairs.

    Args:
        above, below: [N] of each item; below is >= 0 and its sum above 0. Resamples whose sum is 0 are left out.
    """
    parts = [(weights @ above, weights @ below) for weights in resamples(rng, len(above), MEAN_DRAWS, len(above))]
    top, bottom = (np.concatenate(part) for part in zip(*parts, strict=True))
    usable = bottom > 0
    value = float(above.sum() / below.sum())
    method = f"bootstrap, {len(above)} {items_are}"
    return from_draws(value, top[usable] / bottom[usable], len(above), levels, level, method)


def block_share(
    hits: npt.NDArray[np.bool_],
    blocks: IntArray,
    *,
    rng: np.random.Generator,
    levels: Sequence[float] = (0.95,),
    level: float = 0.95,
    blocks_are: str = "blocks",
) -> Estimate:
    """Share of hits, 0..1. Where all or none hit, resampling shows no spread: exact binomial bounds."""
    total, count = len(hits), int(hits.sum())
    if 0 < count < total:
        return block_mean(hits.astype(np.float64), blocks, rng=rng, levels=levels, level=level, blocks_are=blocks_are)

    return exact_share(count, total, levels=levels, level=level, items_are="tokens")


def exact_share(
    hits: float, count: float, *, levels: Sequence[float] = (0.95,), level: float = 0.95, items_are: str = "items"
) -> Estimate:
    """A share, 0..1, with Clopper and Pearson's exact binomial interval; counts may be fractions."""

    def bounds(one_sided: float) -> tuple[float, float]:
        tail = 1 - one_sided
        low = 0.0 if hits <= 0 else float(scipy.stats.beta.ppf(tail, hits, count - hits + 1))
        high = 1.0 if hits >= count else float(scipy.stats.beta.ppf(1 - tail, hits + 1, count - hits))
        return low, high

    return bounded(hits / count, bounds, levels, level, f"Clopper-Pearson, {count:g} {items_are}")


def bounded(value: float, bounds: Bound, levels: Sequence[float], level: float, method: str) -> Estimate:
    """An estimate from a function that gives bounds for the confidence of one side."""
    interval = Interval(*bounds((1 + level) / 2), level, method)
    return Estimate(value, interval, {one: bounds(one) for one in levels})


def block_quantile(
    values: FloatArray,
    q: float,
    blocks: IntArray,
    *,
    rng: np.random.Generator,
    levels: Sequence[float] = (0.95,),
    level: float = 0.95,
    blocks_are: str = "blocks",
) -> Estimate:
    """Quantile `q` (0..1) over tokens with a block bootstrap (QUANTILE_DRAWS resamples of whole blocks)."""
    order = np.argsort(values, kind="stable")
    ranked, owner = values[order], blocks[order]  # [N]
    count = int(blocks.max()) + 1
    draws = []
    for weights in resamples(rng, count, QUANTILE_DRAWS, len(values)):
        reached = weights[:, owner].cumsum(axis=1)  # [draws, N] tokens up to this rank
        draws.append(ranked[(reached < q * reached[:, -1:]).sum(axis=1)])
    return from_draws(
        float(np.quantile(values, q)),
        np.concatenate(draws),
        count,
        levels,
        level,
        f"block bootstrap, {blocks_are}",
    )


def order_statistic_quantile(
    values: FloatArray, q: float = 0.5, *, levels: Sequence[float] = (0.95,), level: float = 0.95
) -> Estimate:
    """Quantile of independent values with the distribution-free interval of the order statistics.

    scipy.stats.quantile_test inverts the binomial test; where too few values exist for a bound, it is absent.
    """

    def bound(alternative: str, confidence: float) -> tuple[float, float]:
        found = scipy.stats.quantile_test(values, p=q, alternative=alternative).confidence_interval(confidence)
        return float(found.low), float(found.high)

    low, high = bound("two-sided", level)
    interval = None
    if math.isfinite(low) and math.isfinite(high):
        interval = Interval(low, high, level, f"order statistics, {len(values)} values")
    one_sided = {}
    for one in levels:
        below, above = bound("greater", one)[0], bound("less", one)[1]
        if math.isfinite(below) and math.isfinite(above):
            one_sided[one] = (below, above)
    return Estimate(float(np.quantile(values, q)), interval, one_sided)


def count_for_percentile(p: float, *, confidence: float = 0.95, over: int = 0) -> int:
    """Smallest n whose order statistics bound the percentile `p` (0.5..1) from above.

    I(p; n - over, over + 1) <= 1 - confidence, with I the regularized incomplete beta function: MLPerf's
    early-stopping rule without its tolerance. 299 values for p99 at 95 %, 29 for p90.

    Args:
        over: values that may lie above the bound.
    """
    n = over + 1
    while scipy.special.betainc(n - over, over + 1, p) > 1 - confidence:
        n += 1
    return n


def carries_percentile(count: int, p: float, *, confidence: float = 0.95) -> bool:
    """Whether `count` values can carry the percentile `p` (0..1); a low percentile counts as its mirror."""
    return count >= count_for_percentile(max(p, 1 - p), confidence=confidence)


def _portions(total: int, width: int) -> Iterator[int]:
    """Row counts that add up to `total`, so that rows x width stays below CHUNK."""
    rows = max(1, CHUNK // max(width, 1))
    for start in range(0, total, rows):
        yield min(rows, total - start)


def resamples(rng: np.random.Generator, blocks: int, draws: int, width: int) -> Iterator[FloatArray]:
    """How often each block is drawn, [rows, blocks], in portions that keep rows x width below CHUNK."""
    chances = np.full(blocks, 1 / blocks)
    for rows in _portions(draws, width):
        yield rng.multinomial(blocks, chances, size=rows).astype(np.float64)


def from_draws(
    value: float, draws: FloatArray, blocks: int, levels: Sequence[float], level: float, method: str
) -> Estimate:
    """The estimate whose interval is the percentiles of resampled values, widened for few blocks (see the module).

    Args:
        draws: the value of each resample.
        blocks: how many independent things were resampled; with fewer than two there is no interval.
    """
    if blocks < 2:
        return Estimate(value)

    def bounds(one_sided: float) -> tuple[float, float]:
        t = scipy.stats.t.ppf(one_sided, blocks - 1)
        tail = float(scipy.stats.norm.cdf(-math.sqrt(blocks / (blocks - 1)) * t))
        low, high = np.quantile(draws, [tail, 1 - tail])
        return float(low), float(high)

    interval = Interval(*bounds((1 + level) / 2), level, method)
    return Estimate(value, interval, {one: bounds(one) for one in levels})
