"""How a number is shown. The stored number is never touched; a shown one never hides which side of a bound it is on."""

from __future__ import annotations

import math

MAX_DIGITS = 17
"""Significant digits that tell any two doubles apart."""

NOT_MEASURED = "-"


def significant(value: float, digits: int = 4) -> str:
    """`value` with `digits` significant digits, thousands separated, exponents only for the very small."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def quantity(value: float | None, unit: str, digits: int = 4) -> str:
    """A number with its unit: `84.30 MB`, `0.3130x`, `91.52 %`; "-" when there is none."""
    if value is None:
        return NOT_MEASURED
    return with_unit(plain(value, unit, digits), unit)


def plain(value: float, unit: str, digits: int = 4) -> str:
    """The number alone, with the digits its unit deserves: ratios below 10 have three decimals."""
    if value.is_integer() and (abs(value) >= 1000 or unit in ("B", "")):
        return f"{value:,.0f}"
    if unit == "x" and digits == 4 and 0.1 <= abs(value) < 10:
        return f"{value:.3f}"
    return significant(value, digits)


def with_unit(number: str, unit: str) -> str:
    return f"{number}{unit}" if unit == "x" else f"{number} {unit}".rstrip()


def interval_decimals(low: float, high: float) -> int | None:
    """Decimals that show half the width of an interval with two digits; None when it has no width."""
    half = (high - low) / 2
    return None if half <= 0 or not math.isfinite(half) else max(0, 1 - math.floor(math.log10(half)))


def span(low: float, high: float, unit: str = "") -> str:
    """An interval: `[0.0310, 0.0374]`."""
    decimals = interval_decimals(low, high)
    if decimals is None:
        return f"[{plain(low, unit)}, {plain(high, unit)}]"
    return f"[{low:,.{decimals}f}, {high:,.{decimals}f}]"


def estimate(value: float, low: float, high: float, unit: str) -> tuple[str, str]:
    """A number with its unit, with the decimals of its interval, and the interval: `0.0342 nats`, `[0.031, 0.037]`."""
    decimals = interval_decimals(low, high)
    number = plain(value, unit) if decimals is None else f"{value:,.{decimals}f}"
    return with_unit(number, unit), span(low, high, unit)


def beside(value: float | None, bound: float | None, unit: str) -> str:
    """`value` with digits enough to be seen on the side of `bound` where it is."""
    if value is None or bound is None:
        return quantity(value, unit)
    for digits in range(4, MAX_DIGITS + 1):
        shown = plain(value, unit, digits)
        if order(float(shown.replace(",", "")), bound) == order(value, bound):
            break
    return with_unit(shown, unit)


def order(a: float, b: float) -> int:
    """-1, 0 or 1 as a is below, equal to or above b."""
    return (a > b) - (a < b)
