from __future__ import annotations

import math

import numpy as np
import pytest

from compress.measure.statistics import (
    block_mean,
    block_quantile,
    block_share,
    carries_percentile,
    count_for_percentile,
    order_statistic_quantile,
    token_blocks,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def clustered(generator: np.random.Generator, blocks: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Skewed values with mean 1 whose blocks differ: exp of a block effect plus noise."""
    effect = np.repeat(generator.normal(0, 0.4, blocks), length)
    values = np.exp(effect + generator.normal(0, 0.8, blocks * length) - (0.4**2 + 0.8**2) / 2)
    return values, np.repeat(np.arange(blocks), length)


def test_block_mean_covers_where_single_tokens_would_not() -> None:
    generator = rng(1)
    covered, naive, below, above = 0, 0, 0, 0
    runs = 200
    for _ in range(runs):
        values, blocks = clustered(generator, 30, 40)
        found = block_mean(values, blocks, rng=generator)
        assert found.interval is not None
        covered += found.interval.low <= 1.0 <= found.interval.high
        below += found.one_sided[0.95][0] <= 1.0
        above += found.one_sided[0.95][1] >= 1.0
        naive += abs(values.mean() - 1.0) <= 1.96 * values.std() / math.sqrt(len(values))
    assert 0.89 <= covered / runs <= 0.99
    assert 0.90 <= below / runs <= 0.995
    assert 0.88 <= above / runs <= 0.99
    assert naive / runs < 0.75


def test_block_mean_matches_the_plain_standard_error_for_independent_values() -> None:
    values = rng(2).normal(3.0, 2.0, 400)
    found = block_mean(values, np.arange(400), rng=rng(3))
    assert found.value == pytest.approx(values.mean(), abs=1e-12)
    assert found.interval is not None
    half = (found.interval.high - found.interval.low) / 2
    assert half == pytest.approx(1.96 * values.std(ddof=1) / 20, rel=0.05)
    lower, upper = found.one_sided[0.95]
    assert found.interval.low < lower < found.value < upper < found.interval.high


def test_the_same_seed_gives_the_same_interval() -> None:
    values, blocks = clustered(rng(4), 10, 20)
    assert block_mean(values, blocks, rng=rng(5)) == block_mean(values, blocks, rng=rng(5))
    assert block_mean(values, blocks, rng=rng(5)) != block_mean(values, blocks, rng=rng(6))


def test_one_block_carries_no_interval() -> None:
    found = block_mean(np.array([1.0, 2.0]), np.zeros(2, dtype=np.int64), rng=rng())
    assert found.value == 1.5
    assert found.interval is None
    assert found.one_sided == {}


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_equal_values_collapse_to_a_point(value: float) -> None:
    found = block_mean(np.full(70, value), np.arange(70) // 7, rng=rng())
    assert found.value == value
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (value, value)


def test_map_moves_value_and_all_bounds() -> None:
    values, blocks = clustered(rng(9), 12, 10)
    plain = block_mean(values, blocks, rng=rng(1), levels=(0.9, 0.95))
    mapped = plain.map(math.exp)
    assert plain.interval is not None
    assert mapped.interval is not None
    assert mapped.value == math.exp(plain.value)
    assert mapped.interval.high == math.exp(plain.interval.high)
    assert mapped.one_sided[0.9][0] == math.exp(plain.one_sided[0.9][0])


def test_share_of_a_mixed_sample_uses_the_bootstrap() -> None:
    hits = rng(10).random(1000) < 0.8
    found = block_share(hits, np.arange(1000) // 10, rng=rng(11))
    assert found.value == hits.mean()
    assert found.interval is not None
    assert "bootstrap" in found.interval.method
    assert found.interval.high - found.interval.low == pytest.approx(2 * 1.96 * 0.4 / math.sqrt(1000), rel=0.3)


def test_a_share_of_one_is_not_certain() -> None:
    """Resampling 100 hits of 100 never shows a miss; the exact bound is the rule of three."""
    found = block_share(np.ones(100, dtype=bool), np.arange(100), rng=rng())
    assert found.value == 1.0
    assert found.one_sided[0.95] == (pytest.approx(0.05 ** (1 / 100)), 1.0)
    assert found.interval is not None
    assert found.interval.low == pytest.approx(0.025 ** (1 / 100))


def test_block_quantile_covers_the_median() -> None:
    generator = rng(12)
    covered, runs = 0, 120
    for _ in range(runs):
        effect = np.repeat(generator.normal(0, 0.5, 30), 20)
        values = np.exp(effect + generator.normal(0, 1.0, 600))
        interval = block_quantile(values, 0.5, np.repeat(np.arange(30), 20), rng=generator).interval
        assert interval is not None
        covered += interval.low <= 1.0 <= interval.high
    assert 0.87 <= covered / runs <= 1.0


def test_block_quantile_equals_a_slow_resample_of_whole_blocks() -> None:
    """With the same block counts, pooling the tokens by hand gives the same draws."""
    values = rng(13).exponential(size=60)
    blocks = np.repeat(np.arange(6), 10)
    found = block_quantile(values, 0.9, blocks, rng=rng(14))
    generator = rng(14)
    slow = []
    for weights in generator.multinomial(6, np.full(6, 1 / 6), size=1000):
        pooled = np.concatenate([np.tile(values[blocks == b], weights[b]) for b in range(6)])
        slow.append(np.quantile(pooled, 0.9, method="inverted_cdf"))
    assert found.interval is not None
    tail = 0.00203  # Phi(-sqrt(6/5) t(0.975, 5))
    assert found.interval.low == pytest.approx(np.quantile(slow, tail), rel=1e-2)
    assert found.interval.high == pytest.approx(np.quantile(slow, 1 - tail), rel=1e-2)


def test_token_blocks_are_windows_when_there_are_enough_and_runs_otherwise() -> None:
    many = np.repeat(np.arange(5, 45), 100)
    blocks, words = token_blocks(many)
    assert words == "40 windows"
    assert np.array_equal(blocks, many - 5)

    few = np.repeat(np.array([7, 3]), [1000, 400])
    blocks, words = token_blocks(few)
    assert words == "28 runs of tokens"  # 16 of 62 or 63 tokens, and 400 // 32 = 12
    assert np.bincount(blocks).min() >= 32
    assert np.array_equal(np.unique(blocks), np.arange(28))
    assert len(np.unique(blocks[:1000])) == 16
    assert (np.diff(blocks) >= 0).all()


def test_token_blocks_never_cut_short_windows() -> None:
    blocks, words = token_blocks(np.repeat(np.arange(3), 40))
    assert words == "3 windows"
    assert blocks.tolist() == [0] * 40 + [1] * 40 + [2] * 40


def test_order_statistics_bound_the_median_exactly() -> None:
    """Of 6 values the extremes bound the median with 1 - 2/64 = 96.9 %; of 5 with 93.75 %: too little."""
    six = order_statistic_quantile(np.array([6.0, 1.0, 5.0, 2.0, 4.0, 3.0]))
    assert six.value == 3.5
    assert six.interval is not None
    assert (six.interval.low, six.interval.high) == (1.0, 6.0)
    five = order_statistic_quantile(np.arange(5.0))
    assert five.interval is None
    assert five.one_sided[0.95] == (0.0, 4.0)  # 1 - 1/32 = 96.9 %
    assert order_statistic_quantile(np.arange(4.0)).one_sided == {}


@pytest.mark.parametrize(
    ("p", "confidence", "over", "expected"),
    [
        (0.5, 0.95, 0, 5),
        (0.5, 0.95, 1, 8),
        (0.5, 0.99, 5, 22),
        (0.9, 0.95, 0, 29),
        (0.9, 0.99, 1, 64),
        (0.95, 0.95, 1, 93),
        (0.99, 0.95, 0, 299),
        (0.99, 0.99, 1, 662),
        (0.99, 0.99, 5, 1307),
    ],
)
def test_counts_for_percentiles_are_the_published_ones(p: float, confidence: float, over: int, expected: int) -> None:
    assert count_for_percentile(p, confidence=confidence, over=over) == expected


def test_a_percentile_needs_its_count() -> None:
    assert not carries_percentile(298, 0.99)
    assert carries_percentile(299, 0.99)
    assert carries_percentile(59, 0.05)
    assert not carries_percentile(58, 0.05)
