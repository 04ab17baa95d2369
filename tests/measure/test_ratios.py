"""Ratios of paired times and their exact intervals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from compress.measure.latency.ratios import MOST_ROUNDS, RANKS_FROM_ROUNDS, paired_ratio


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("rounds", [8, 10, 40])
def test_the_interval_covers_as_promised_and_names_its_method(rounds: int) -> None:
    generator = rng(15)
    covered, upper, runs = 0, 0, 400
    for _ in range(runs):
        found = paired_ratio(np.log(1.25) + generator.normal(0, 0.05, rounds))
        assert found.interval is not None
        covered += found.interval.low <= 1.25 <= found.interval.high
        upper += found.one_sided[0.95][1] >= 1.25
    assert 0.92 <= covered / runs <= 0.99
    assert 0.92 <= upper / runs <= 0.99
    assert ("signed ranks" in found.interval.method) == (rounds >= RANKS_FROM_ROUNDS)


def test_the_interval_is_the_set_of_ratios_that_the_signed_rank_test_keeps() -> None:
    """Against scipy's exact test: just inside both ends it keeps the ratio, just outside it rejects."""
    for seed, n in itertools.product(range(5), (10, 15, 24)):
        r = rng(seed).standard_t(3, n) * 0.1
        interval = paired_ratio(r, independent=n).interval
        assert interval is not None
        for end, inward in ((interval.low, 1), (interval.high, -1)):
            inside, outside = (
                scipy.stats.wilcoxon(r - math.log(end) - step * inward * 1e-9, method="exact").pvalue
                for step in (1, -1)
            )
            assert inside > 0.05 >= outside


def test_the_value_is_the_median_of_walsh_averages() -> None:
    r = rng(16).normal(size=7)
    slow = [(r[i] + r[j]) / 2 for i in range(7) for j in range(i, 7)]
    assert paired_ratio(r).value == pytest.approx(math.exp(np.median(slow)))


def test_spikes_move_neither_value_nor_interval_much() -> None:
    calm = math.log(1.1) + rng(3).normal(0, 0.001, 15)
    spiked = calm.copy()
    spiked[3] = math.log(30.0)
    for r in (calm, spiked):
        found = paired_ratio(r)
        assert found.value == pytest.approx(1.1, rel=2e-3)
        assert found.interval is not None
        assert found.interval.high - found.interval.low < 5e-3


def test_exchanging_the_two_inverts_everything() -> None:
    r = rng(5).normal(0.1, 0.05, 33)
    there, back = paired_ratio(r), paired_ratio(-r)
    assert there.value == pytest.approx(1 / back.value)
    assert there.interval is not None
    assert back.interval is not None
    assert there.interval.low == pytest.approx(1 / back.interval.high)


def test_rounds_that_resemble_their_neighbours_are_worth_fewer() -> None:
    """The plain interval misses three times as often as it says; the one that counts stays near what it says."""
    missed = {"plain": 0, "counted": 0}
    for seed in range(300):
        noise = rng(seed).normal(0, 0.05, 80)
        r = np.convolve(noise, np.ones(3) / 3, mode="valid")  # neighbours share two thirds
        for name, independent in (("plain", len(r)), ("counted", None)):
            interval = paired_ratio(r, independent=independent).interval
            assert interval is not None
            missed[name] += not interval.low <= 1 <= interval.high
    assert missed["plain"] > 45
    assert missed["counted"] < 30
    assert "worth" in interval.method


def test_a_level_that_so_few_rounds_cannot_carry_is_absent() -> None:
    """Of 10 rounds the least tail is 2^-10."""
    found = paired_ratio(rng(1).normal(size=10), levels=(0.95, 0.999, 0.9999))
    assert set(found.one_sided) == {0.95, 0.999}
    assert found.one_sided[0.999][0] < found.one_sided[0.95][0] < found.value


def test_many_rounds_and_one() -> None:
    found = paired_ratio(rng(17).normal(math.log(2), 0.1, 10 * MOST_ROUNDS))
    assert found.value == pytest.approx(2.0, rel=0.01)
    assert found.interval is not None
    assert found.interval.high - found.interval.low < 0.03
    alone = paired_ratio(np.array([0.0]))
    assert (alone.value, alone.interval, alone.one_sided) == (1.0, None, {})
