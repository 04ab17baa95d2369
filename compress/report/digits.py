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
    """The number alone, with the digits its unit deserves."""
    if value.is_integer() and (abs(value) >= 1000 or unit in ("B", "")):
        return f"{value:,.0f}"
    if unit == "x":
        return significant(value, min(digits, 3)) if digits <= 4 else significant(value, digits)
    return significant(value, digits)


def with_unit(number: str, unit: str) -> str:
    return f"{number}{unit}" if unit == "x" else f"{number} {unit}".rstrip()


def span(low: float, high: float, unit: str = "") -> str:
    """An interval: `[0.0310, 0.0374]`, with digits enough to show that the ends differ."""
    for digits in range(3, MAX_DIGITS + 1):
        ends = plain(low, unit, digits), plain(high, unit, digits)
        if ends[0] != ends[1] or low == high:
            break
    return f"[{ends[0]}, {ends[1]}]"


def beside(value: float | None, bound: float | None, unit: str) -> str:
    """`value` with digits enough that it does not look equal to `bound` when it is not."""
    if value is None or bound is None:
        return quantity(value, unit)
    for digits in range(4, MAX_DIGITS + 1):
        shown = plain(value, unit, digits)
        if value == bound or shown != plain(bound, unit, digits):
            break
    return with_unit(shown, unit)


def size(megabytes: float) -> str:
    """A size given in MB (10^6 bytes) in the unit a person would choose."""
    if megabytes >= 1000:
        return f"{significant(megabytes / 1000, 4)} GB"
    return f"{significant(megabytes, 4)} MB"
