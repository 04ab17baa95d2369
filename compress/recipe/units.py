"""Quantities with a unit ("120MB", "30ms", "6pt", "400k") as numbers. MB = 10^6 bytes, as on a disk's label.

Arithmetic is decimal, so that "0.3GB" is exactly 300 MB. Units are case-sensitive: "mb" could be millibits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from compress.errors import UsageError
from compress.metrics import Unit
from compress.recipe.words import did_you_mean, one_of

_QUANTITY = re.compile(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?)\s*([A-Za-z%]\S*)?\s*")

BYTES: Mapping[str, Decimal] = {
    "B": Decimal(1),
    "kB": Decimal(10**3),
    "MB": Decimal(10**6),
    "GB": Decimal(10**9),
}
SECONDS: Mapping[str, Decimal] = {"ms": Decimal("0.001"), "s": Decimal(1)}
MAX_SIZE = 2**63 - 1
"""Bytes: the largest file offset."""
MAX_COUNT = 2**31 - 1
"""Of windows, tokens or prompts: more than any machine gets through, and safe in every index."""
MAX_SECONDS = float(MAX_COUNT)
"""68 years."""

SHARE: Mapping[str, Decimal] = {"": Decimal(1), "%": Decimal("0.01")}
COUNT: Mapping[str, Decimal] = {"": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6)}

UNITS_OF: Mapping[Unit, Mapping[str, Decimal]] = {
    "": {"": Decimal(1)},
    "nats": {"": Decimal(1)},
    "bits": {"": Decimal(1)},
    "%": {"%": Decimal(1)},
    "pt": {"pt": Decimal(1)},
    "x": {"x": Decimal(1)},
    "tok/s": {"tok/s": Decimal(1)},
    "ms": {"ms": Decimal(1), "s": Decimal(1000)},
    "B": BYTES,
    "MB": {unit: factor / BYTES["MB"] for unit, factor in BYTES.items()},
}
"""For each unit that a metric is stored in: the units a gate may use, and their worth in the stored one."""


def parse_quantity(text: str, units: Mapping[str, Decimal]) -> Decimal:
    """The number that `text` stands for, in the unit whose worth is 1 in `units`.

    Args:
        units: worth of each allowed unit; the key "" allows a bare number.

    Raises:
        UsageError: the text is no finite number, or its unit is missing or not among `units`.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UsageError(f"`{text.strip()}` is not {_form(units)}")
    number, unit = match[1], match[2] or ""
    if unit in units:
        return Decimal(number) * units[unit]
    if not unit:
        raise UsageError(f"`{text.strip()}` has no unit: write {_examples(number, units)}")
    if set(units) == {""}:
        raise UsageError(f"`{text.strip()}` has the unit `{unit}`, but this number has none: write {number}")
    meant = did_you_mean(unit, units)
    raise UsageError(f"`{text.strip()}` has the unknown unit `{unit}`{meant}: write {_examples(number, units)}")


def parse_size(text: str) -> int:
    """Bytes in "5GB". Raises UsageError, also for a size that is no whole number from 1 to MAX_SIZE."""
    size = parse_quantity(text, BYTES)
    if size > MAX_SIZE:
        raise UsageError(f"`{text.strip()}` is more than a file can hold, which is {MAX_SIZE} bytes")
    if size < 1 or size != int(size):
        raise UsageError(f"`{text.strip()}` is not a positive whole number of bytes")
    return int(size)


def parse_seconds(text: str) -> float:
    """Seconds in "60s" or "500ms". Raises UsageError, also for a time that is not positive or above MAX_SECONDS."""
    seconds = float(parse_quantity(text, SECONDS))
    if seconds > MAX_SECONDS:
        raise UsageError(f"`{text.strip()}` is not at most {MAX_SECONDS:.0f} s")
    if not seconds > 0:
        raise UsageError(f"`{text.strip()}` is not a positive time")
    return seconds


def parse_count(text: str) -> int:
    """The whole number in "16384", "400k" or "1.5M". Raises UsageError, also for a count below 1 or above MAX_COUNT."""
    count = parse_quantity(text, COUNT)
    if count > MAX_COUNT:
        raise UsageError(f"`{text.strip()}` is not at most {MAX_COUNT}")
    if count < 1 or count != int(count):
        raise UsageError(f"`{text.strip()}` is not a positive whole number")
    return int(count)


def parse_share(text: str) -> float:
    """The share from 0 to 1 in "5%" or "0.05". Raises UsageError, also for a whole number, which could be either."""
    share = parse_quantity(text, SHARE)
    if not text.strip().endswith("%") and "." not in text and share:
        raise UsageError(f"`{text.strip()}` is no share: write {text.strip()}%, or a number with a point such as 0.05")
    if not 0 <= share <= 1:
        raise UsageError(f"`{text.strip()}` is not a share from 0% to 100%")
    return float(share)


def write_size(size: int) -> str:
    """`size` bytes in the largest unit that keeps it a whole number: what `parse_size` reads back."""
    unit = next(unit for unit in ("GB", "MB", "kB", "B") if size % BYTES[unit] == 0)
    return f"{size // int(BYTES[unit])}{unit}"


def _form(units: Mapping[str, Decimal]) -> str:
    named = [unit for unit in units if unit]
    if not named:
        return "a finite number"
    if "" in units:
        return f"a finite number, alone or followed by {one_of(named)}"
    return f"a finite number followed by {one_of(named)}"


def _examples(number: str, units: Mapping[str, Decimal]) -> str:
    return one_of([number + unit for unit in units])
