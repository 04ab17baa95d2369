"""Sample sizes: against simulation, and against the figures of the reference table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.power import count_to_decide, detectable_drop, items_for_drop, unpaired_items_for_drop


@pytest.mark.parametrize(
    ("drop", "flips", "items"), [(0.005, 0.02, 4947), (0.01, 0.05, 3092), (0.02, 0.10, 1546), (0.05, 0.15, 371)]
)
def test_items_of_the_table(drop: float, flips: float, items: int) -> None:
    # The table leaves D^2 out, which is a part in a thousand here.
    assert items_for_drop(drop, flips) == pytest.approx(items, rel=0.02)


@pytest.mark.parametrize(("drop", "items"), [(0.005, 118_706), (0.01, 29_677), (0.05, 1_188)])
def test_unpaired_items_of_the_table(drop: float, items: int) -> None:
    assert unpaired_items_for_drop(drop, 0.6) == pytest.approx(items, rel=1e-3)


def test_the_planned_items_find_the_drop_as_often_as_asked() -> None:
    drop, flips, runs = 0.02, 0.05, 4000
    n = items_for_drop(drop, flips)
    rng = np.random.default_rng(0)
    kept = 1 - flips
    counts = rng.multinomial(n, [(flips + drop) / 2, (flips - drop) / 2, kept], size=runs)
    difference = (counts[:, 0] - counts[:, 1]) / n
    spread = np.sqrt((counts[:, 0] + counts[:, 1]) / n - difference**2) / math.sqrt(n)
    found = (difference / spread > 1.6449).mean()
    assert 0.77 <= found <= 0.84


@given(st.integers(2, 10**6), st.floats(1e-3, 1))
def test_the_detectable_drop_needs_about_so_many_items(items: int, flips: float) -> None:
    drop = detectable_drop(items, flips)
    assert drop is not None
    if drop < flips:
        assert items_for_drop(drop, flips) <= items + 1


def test_without_flips_nothing_is_known() -> None:
    assert detectable_drop(100, 0.0) is None


@pytest.mark.parametrize(("drop", "flips"), [(0.0, 0.1), (-0.1, 0.1), (0.2, 0.1)])
def test_what_cannot_be(drop: float, flips: float) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        items_for_drop(drop, flips)


def test_count_to_decide() -> None:
    # Half-width 2 at 100 items; the threshold is 1 away: four times as many.
    assert count_to_decide(100, 5.0, 7.0, 6.0) == 400
    assert count_to_decide(100, 5.0, 7.0, 5.0) is None
    assert count_to_decide(100, 5.0, math.inf, 6.0) is None
