from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.measure.statistics import MEAN_DRAWS, Estimate, exact_share
from compress.measure.tasks.paired import (
    Clusters,
    cluster,
    constant_mean,
    holm,
    mcnemar_p,
    no_narrower,
    resampled_sums,
    score_drop,
)
from compress.records import Interval


def test_mcnemar_is_the_tail_of_a_fair_coin() -> None:
    assert mcnemar_p(5, 0) == pytest.approx(1 / 32)
    assert mcnemar_p(4, 0) == pytest.approx(1 / 16)
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(0, 7) == 1.0
    for b, c in itertools.product(range(7), range(7)):
        tosses = list(itertools.product((0, 1), repeat=b + c))
        expected = sum(sum(toss) >= b for toss in tosses) / len(tosses)
        assert mcnemar_p(b, c) == pytest.approx(expected)


def test_holm_against_the_definition() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("losses", "gains", "count", "level", "low", "high"),
    [
        # Bentur et al. (2009) in Fagerland, Lydersen and Laake, "Statistical Analysis of Contingency Tables" (2017).
        (1, 7, 21, 0.95, -0.517, -0.026),
        # R package PropCIs, scoreci.mp(25, 28, 618) at 90 %, which estimates (28 - 25) / 618.
        (28, 25, 618, 0.90, -0.0148, 0.0247),
    ],
)
def test_score_interval_against_published_values(
    losses: int, gains: int, count: int, level: float, low: float, high: float
) -> None:
    found = score_drop(losses, gains, count, level=level).interval
    assert found is not None
    digits = len(str(high).split(".")[1])
    assert (round(found.low, digits), round(found.high, digits)) == (low, high)


def slow_score_bound(b: int, c: int, n: int, z: float) -> float:
    """The largest d of a fine grid that Tango's statistic does not refuse; the constrained estimate by brute force."""
    best = (b - c) / n
    for d in np.arange(best + 1e-4, 1.0, 1e-4):
        q = np.arange(max(0.0, -d), min(1.0, 1 - d) + 1e-9, 2e-4)
        p = q + d
        rest = 1 - p - q
        keep = (rest > 1e-9) | ((n == b + c) & (rest > -1e-9))
        with np.errstate(divide="ignore", invalid="ignore"):
            likelihood = (
                (b * np.log(p) if b else 0 * p)
                + (c * np.log(q) if c else 0 * q)
                + ((n - b - c) * np.log(np.maximum(rest, 1e-300)) if n > b + c else 0 * q)
            )
        q_hat = q[keep][np.argmax(likelihood[keep])]
        variance = n * (2 * q_hat + d * (1 - d))
        if (b - c - n * d) / math.sqrt(variance) < -z:
            return best
        best = float(d)
    return 1.0


@pytest.mark.parametrize(("b", "c", "n"), [(3, 1, 40), (0, 4, 25), (0, 0, 30), (9, 9, 60)])
def test_score_interval_against_brute_force(b: int, c: int, n: int) -> None:
    found = score_drop(b, c, n).one_sided[0.95]
    assert found[1] == pytest.approx(slow_score_bound(b, c, n, 1.6448536), abs=2e-3)
    assert -found[0] == pytest.approx(slow_score_bound(c, b, n, 1.6448536), abs=2e-3)


def test_no_flips_leave_a_drop_possible() -> None:
    z = 1.6448536269514722
    for count in (2, 100, 10_000):
        low, high = score_drop(0, 0, count).one_sided[0.95]
        assert high == pytest.approx(z**2 / (count + z**2))
        assert low == pytest.approx(-high)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 200))
def test_score_interval_holds_together(b: int, c: int, same: int) -> None:
    n = b + c + same
    if n == 0:
        return
    found, mirrored = score_drop(b, c, n, levels=(0.8, 0.95, 0.99)), score_drop(c, b, n, levels=(0.8, 0.95, 0.99))
    assert found.value == (b - c) / n
    before = 0.0
    for level in (0.8, 0.95, 0.99):
        low, high = found.one_sided[level]
        assert -1 <= low <= found.value <= high <= 1
        assert high - low > before, "wider with more confidence, and never of no width"
        before = high - low
        assert mirrored.one_sided[level] == pytest.approx((-high, -low))
    assert found.interval is not None
    assert found.interval.low <= found.one_sided[0.95][0]


def test_score_bounds_cover_what_they_promise() -> None:
    """By simulation: the share of samples whose one-sided 95 % bounds hold the true drop.

    Worst is the lower bound where nothing is ever gained: 92 %.
    """
    rng = np.random.default_rng(5)
    for n, losing, gaining in ((100, 0.05, 0.03), (100, 0.03, 0.0), (300, 0.02, 0.02), (760, 0.08, 0.04)):
        table = rng.multinomial(n, [losing, gaining, 1 - losing - gaining], size=1500)
        bounds = {(b, c): score_drop(b, c, n).one_sided[0.95] for b, c, _ in {tuple(map(int, row)) for row in table}}
        found = [bounds[int(b), int(c)] for b, c, _ in table]
        drop = losing - gaining
        assert sum(high >= drop for _, high in found) / len(found) > 0.915
        assert sum(low <= drop for low, _ in found) / len(found) > 0.915


def test_exact_share_is_the_rule_of_three_at_the_edges() -> None:
    assert exact_share(0, 100).one_sided[0.95] == (0.0, pytest.approx(1 - 0.05**0.01))
    assert exact_share(100, 100).one_sided[0.95] == (pytest.approx(0.05**0.01), 1.0)
    import scipy.stats

    expected = scipy.stats.binomtest(13, 40).proportion_ci(0.95, method="exact")
    found = exact_share(13, 40).interval
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_constant_mean_says_what_unseen_items_could_change() -> None:
    found = constant_mean(0.0, -1.0, 1.0, 59).one_sided[0.95]
    assert found == (pytest.approx(-0.0495, abs=1e-4), pytest.approx(0.0495, abs=1e-4))
    low, high = constant_mean(1.0, 0.0, 1.0, 59).one_sided[0.95]
    assert (low, high) == (pytest.approx(0.9505, abs=1e-4), 1.0)


def test_clusters_are_numbered_inside_their_tasks() -> None:
    found = cluster([(0, "a"), (0, "b"), (0, "a"), (1, "a"), (1, "c")])
    assert found.ids.tolist() == [0, 1, 0, 2, 3]
    assert found.strata.tolist() == [0, 0, 1, 1]
    assert (found.count, found.fewest, found.independent) == (4, 2, False)
    assert cluster([(0, 1), (0, 2)]).independent
    assert not cluster([(0, 1), (1, 1)]).independent


def test_resampling_keeps_clusters_together_and_tasks_apart() -> None:
    ids = np.array([0, 0, 1, 2, 3, 3])
    clusters = Clusters(ids, np.array([0, 0, 1, 1]))
    columns = np.stack([np.ones(6), (ids < 2).astype(float), (ids == 3).astype(float)], axis=1)
    found = resampled_sums(columns, clusters, np.random.default_rng(0))
    assert found.shape == (MEAN_DRAWS, 3)
    assert set(found[:, 1]) == {2.0, 3.0, 4.0}, "two of the clusters of 2 and 1 items"
    assert set(found[:, 2]) == {0.0, 2.0, 4.0}, "a cluster comes whole"
    again = resampled_sums(columns, clusters, np.random.default_rng(0))
    assert (found == again).all()


def test_resampled_spread_is_that_of_cluster_means() -> None:
    """Against the formula of the cluster-robust standard error, for clusters of one size."""
    rng = np.random.default_rng(1)
    means = rng.normal(size=50)
    values = np.repeat(means, 4)
    clusters = cluster([(0, int(index)) for index in np.repeat(np.arange(50), 4)])
    sums = resampled_sums(np.stack([values, np.ones(200)], axis=1), clusters, np.random.default_rng(2))
    spread = (sums[:, 0] / sums[:, 1]).std()
    assert spread == pytest.approx(means.std() / math.sqrt(50), rel=0.03)
    assert spread > 1.8 * values.std() / math.sqrt(200), "twice what independent items would give"


def test_no_narrower_takes_the_outer_bounds() -> None:
    one = Estimate(1.0, Interval(0.9, 1.1, 0.95, "one"), {0.95: (0.92, 1.08)})
    other = Estimate(1.0, Interval(0.8, 1.05, 0.95, "other"), {0.95: (0.85, 1.04)})
    found = no_narrower(one, other)
    assert found.interval == Interval(0.8, 1.1, 0.95, "one, no narrower than other")
    assert found.one_sided == {0.95: (0.85, 1.08)}
    assert no_narrower(Estimate(1.0), other) == Estimate(1.0)
