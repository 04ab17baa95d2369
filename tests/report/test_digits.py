from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compress.report.digits import beside, estimate, quantity, span


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "MB", "-"),
        (269.060552, "MB", "269.1 MB"),
        (13500.2, "MB", "13,500 MB"),
        (134515008.0, "", "134,515,008"),
        (0.43560, "x", "0.436x"),
        (1.0, "x", "1.000x"),
        (12.3456, "x", "12.35x"),
        (91.5213, "%", "91.52 %"),
        (0.000012345, "nats", "1.234e-05 nats"),
        (0.0, "nats", "0 nats"),
        (-0.31, "pt", "-0.3100 pt"),
    ],
)
def test_quantity(value: float | None, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_interval_sets_the_decimals_of_its_number() -> None:
    assert estimate(0.078123, 0.0751, 0.0812, "nats") == ("0.0781 nats", "[0.0751, 0.0812]")
    assert estimate(86.314, 85.5, 87.1, "%") == ("86.31 %", "[85.50, 87.10]")


def test_interval_without_width() -> None:
    assert span(1.0, 1.0, "x") == "[1.000, 1.000]"


def test_a_value_just_past_its_bound_does_not_look_equal() -> None:
    assert beside(0.100004, 0.1, "nats") == "0.100004 nats"
    assert beside(120.0, 120.0, "MB") == "120.0 MB"
    assert beside(117.2, 120.0, "MB") == "117.2 MB"


@example(100.75, 100.75, "")
@example(0.100004, 0.1, "nats")
@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9), st.sampled_from(["", "MB", "ms", "x", "%", "nats"]))
def test_shown_on_the_right_side_of_the_bound(value: float, bound: float, unit: str) -> None:
    shown = float(beside(value, bound, unit).removesuffix(unit).replace(",", ""))
    assert (shown > bound) == (value > bound)
    assert (shown < bound) == (value < bound)
    assert shown == pytest.approx(value, rel=1e-2, abs=1e-3)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e3))
def test_ends_of_an_interval_differ(low: float, width: float) -> None:
    left, right = span(low, low + width).strip("[]").split(", ")
    assert left != right or low + width == low
