"""Sample sizes: against simulation with independent tests, and against the figures of the reference table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.power import (
    count_to_decide,
    detectable_drop,
    find_power,
    items_for_drop,
    items_to_pass,
    unpaired_items_for_drop,
)


def flips_of(items: int, drop: float, flips: float, runs: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Losses and gains of simulated comparisons, [runs] each."""
    flips = max(flips, drop)
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(items, [(flips + drop) / 2, (flips - drop) / 2, 1 - flips], size=runs)
    return drawn[:, 0], drawn[:, 1]


def found_share(items: int, drop: float, flips: float) -> float:
    losses, gains = flips_of(items, drop, flips)
    p = scipy.stats.binom.sf(losses - 1, losses + gains, 0.5)
    return float((p < 0.05).mean())


@pytest.mark.parametrize(
    ("items", "drop", "flips"),
    [(20, 0.3, 0.05), (60, 0.1, 0.05), (100, 0.025, 0.01), (759, 0.02, 0.05), (3000, 0.02, 0.2), (20_000, 0.004, 0.05)],
)
def test_the_power_is_that_of_simulated_comparisons(items: int, drop: float, flips: float) -> None:
    assert find_power(items, drop, flips) == pytest.approx(found_share(items, drop, flips), abs=0.03)


@pytest.mark.parametrize(
    ("items", "flips"), [(20, 0.0), (60, 0.05), (100, 0.01), (200, 0.02), (759, 0.05), (5000, 0.1)]
)
def test_the_detectable_drop_is_found_in_80_of_100_runs(items: int, flips: float) -> None:
    drop = detectable_drop(items, flips)
    assert drop is not None
    assert 0.76 <= found_share(items, drop, flips) <= 0.87


def test_the_planned_items_find_the_drop() -> None:
    items = items_for_drop(0.02, 0.05)
    assert found_share(items, 0.02, 0.05) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(("drop", "flips", "items"), [(0.005, 0.02, 4947), (0.01, 0.05, 3092), (0.02, 0.10, 1546)])
def test_items_are_somewhat_more_than_in_the_table_of_the_approximation(drop: float, flips: float, items: int) -> None:
    assert items < items_for_drop(drop, flips) < 1.09 * items


@pytest.mark.parametrize(("margin", "flips"), [(0.05, 0.05), (0.08, 0.05), (0.02, 0.05), (0.15, 0.15)])
def test_a_gate_passes_with_the_items_it_needs(margin: float, flips: float) -> None:
    from compress.measure.tasks.paired import score_drop

    items = items_to_pass(margin, flips)
    losses, gains = flips_of(items, 0.0, flips, runs=400)
    passed = [score_drop(int(b), int(c), items).one_sided[0.95][1] < margin for b, c in zip(losses, gains, strict=True)]
    assert 0.74 <= np.mean(passed) <= 0.88


@pytest.mark.parametrize(("drop", "items"), [(0.005, 118_706), (0.01, 29_677), (0.05, 1_188)])
def test_unpaired_items_of_the_table(drop: float, items: int) -> None:
    assert unpaired_items_for_drop(drop, 0.6) == pytest.approx(items, rel=1e-3)


@given(st.integers(1, 3000), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_a_detectable_drop_is_a_share_and_fewer_items_find_less(items: int, flips: float) -> None:
    few, more = detectable_drop(items, flips), detectable_drop(2 * items, flips)
    assert few is None or 0 < few <= 1
    assert few is None or (more is not None and more <= few + 1e-3)


def test_so_few_items_find_nothing() -> None:
    assert [detectable_drop(items, 0.05) is None for items in (1, 4, 5, 20)] == [True, True, False, False]


@pytest.mark.parametrize("drop", [0.0, -0.1, 1.1])
def test_what_cannot_be(drop: float) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        items_for_drop(drop, 0.1)
    with pytest.raises(ValueError, match="cannot be"):
        items_to_pass(drop, 0.1)


def test_count_to_decide() -> None:
    # Half-width 2 at 100 items; the threshold is 1 away: four times as many.
    assert count_to_decide(100, 5.0, 7.0, 6.0) == 400
    assert count_to_decide(100, 5.0, 7.0, 5.0) is None
    assert count_to_decide(100, 5.0, math.inf, 6.0) is None
