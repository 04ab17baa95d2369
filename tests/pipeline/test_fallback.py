"""When too many layers could not be quantized as asked, there is no result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compress.errors import EXIT_BROKEN_RESULT, BrokenResultError
from compress.pipeline.fallback import check_fallback
from compress.records import LayerRecord, StepRecord


def step(fallen: int, of: int, algorithm: str | None = "gptq") -> StepRecord:
    layers = [
        LayerRecord(f"layer.{index}", (4, 4), algorithm="rtn" if index < fallen else algorithm) for index in range(of)
    ]
    skipped = LayerRecord("head", (4, 4), skipped="tied")
    return StepRecord("quantize", {"algorithm": algorithm}, (*layers, skipped))


@pytest.mark.parametrize(("fallen", "of", "allowed"), [(0, 20, 0.0), (1, 20, 0.05), (20, 20, 1.0), (2, 210, 0.01)])
def test_as_many_as_allowed_are_fine(fallen: int, of: int, allowed: float) -> None:
    check_fallback(step(fallen, of), allowed)


def test_too_many_are_named_with_the_way_out() -> None:
    with pytest.raises(BrokenResultError) as caught:
        check_fallback(step(3, 30), 0.05)
    assert caught.value.exit_code == EXIT_BROKEN_RESULT
    assert "3 of 30 layers (10%) fell back from gptq to round-to-nearest; allowed are 5%" in caught.value.message
    assert "layer.0\n  layer.1\n  layer.2" in caught.value.message
    assert "layer.3" not in caught.value.message
    assert caught.value.hint is not None
    assert "--max-fallback 10%" in caught.value.hint


@pytest.mark.parametrize(("fallen", "of"), [(1, 3), (2, 3), (7, 210), (1, 7)])
def test_what_the_hint_allows_is_enough(fallen: int, of: int) -> None:
    with pytest.raises(BrokenResultError) as caught:
        check_fallback(step(fallen, of), 0.0)
    assert caught.value.hint is not None
    share = float(caught.value.hint.partition("--max-fallback ")[2].partition("%")[0]) / 100
    check_fallback(step(fallen, of), share)


def test_a_long_list_is_cut() -> None:
    with pytest.raises(BrokenResultError, match="and 80 more"):
        check_fallback(step(100, 200), 0.05)


def test_rounding_that_was_asked_is_no_fallback() -> None:
    check_fallback(step(20, 20, "rtn"), 0.0)
    check_fallback(replace(step(0, 0), settings={"algorithm": None}), 0.0)  # a cast
