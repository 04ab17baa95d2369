from __future__ import annotations

from collections.abc import Callable

import pytest

from compress.errors import UsageError
from compress.recipe.units import BYTES, UNITS_OF, parse_count, parse_quantity, parse_seconds, parse_size, write_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("120MB", 120 * 10**6), ("0.3GB", 300_000_000), ("2 kB", 2000), ("7B", 7), ("1e3kB", 10**6)],
)
def test_sizes_are_decimal_and_exact(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(write_size(size)) == size


def test_times_and_counts() -> None:
    assert parse_seconds("60s") == 60.0
    assert parse_seconds("30ms") == 0.03
    assert parse_count("400k") == 400_000
    assert parse_count("1.5M") == 1_500_000
    assert parse_count("16384") == 16_384


@pytest.mark.parametrize(("text", "unit", "value"), [("6pt", "pt", 6), ("75%", "%", 75), ("1.2x", "x", 1.2)])
def test_gate_units(text: str, unit: str, value: float) -> None:
    assert float(parse_quantity(text, UNITS_OF[unit])) == value  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("120", "`120` has no unit: write 120B, 120kB, 120MB or 120GB"),
        ("120MiB", "`120MiB` has the unknown unit `MiB` (did you mean `MB`?): write 120B, 120kB, 120MB or 120GB"),
        ("120mb", "`120mb` has the unknown unit `mb` (did you mean `MB`?): write 120B, 120kB, 120MB or 120GB"),
        ("lots", "`lots` is not a finite number followed by B, kB, MB or GB"),
        ("nan", "`nan` is not a finite number followed by B, kB, MB or GB"),
        ("inf GB", "`inf GB` is not a finite number followed by B, kB, MB or GB"),
        ("1_000MB", "`1_000MB` is not a finite number followed by B, kB, MB or GB"),
        ("1,5GB", "`1,5GB` is not a finite number followed by B, kB, MB or GB"),
        ("", "`` is not a finite number followed by B, kB, MB or GB"),
    ],
)
def test_a_wrong_size_is_a_sentence_with_the_allowed_units(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_quantity(text, BYTES)
    assert caught.value.message == sentence


@pytest.mark.parametrize("text", ["0B", "-5GB", "0.5B"])
def test_a_size_is_a_positive_whole_number_of_bytes(text: str) -> None:
    with pytest.raises(UsageError, match="positive whole number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "-4k", "1.5", "0.0001k"])
def test_a_count_is_a_positive_whole_number(text: str) -> None:
    with pytest.raises(UsageError, match="positive whole number"):
        parse_count(text)


@pytest.mark.parametrize("text", ["0s", "-1s", "1e999s"])
def test_a_time_is_positive_and_finite(text: str) -> None:
    with pytest.raises(UsageError, match=r"positive time|at most"):
        parse_seconds(text)


def test_a_unit_where_none_belongs() -> None:
    with pytest.raises(UsageError, match=r"has the unit `nats`, but this number has none: write 0\.1"):
        parse_quantity("0.1nats", UNITS_OF["nats"])


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_size, "1e999GB"),
        (parse_size, "9223372036854775808B"),
        (parse_size, "9" * 300 + "B"),
        (parse_count, "2147483648"),
        (parse_count, "1e999M"),
        (parse_count, "9" * 300),
        (parse_seconds, "1e300s"),
    ],
)
def test_what_is_too_large_is_a_sentence(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(UsageError, match=r"is more than a file can hold|is not at most"):
        read(text)
