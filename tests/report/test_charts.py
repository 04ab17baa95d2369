from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from rich_report import rich_report
from sample_report import around, fidelity, latency, paired, sample_report

from compress.records import Measurement
from compress.report.html.charts import COLOURS, Box, tradeoff_svg
from compress.report.html.tradeoff import Point, Quality, Tradeoff, Value, tradeoff


def value(number: float, half: float = 0.0) -> Value:
    return Value(number, number - half, number + half, f"{number}")


def chart(*labels: str, size: float | None = 100.0) -> Tradeoff:
    points = [
        Point(name, i == 0, value(10.0 + 5 * i, 0.4), value(80.0 - i, 1.5), size) for i, name in enumerate(labels)
    ]
    return Tradeoff("time per token", Quality("accuracy", "%", True, {}, floor=79.5), tuple(points), "cpu")


def drawn(one: Tradeoff, width: int = 900, height: int = 430) -> str:
    return tradeoff_svg(one, width=width, height=height, salt="x")


def texts(svg: str) -> list[str]:
    """All texts; that it parses at all is the proof that it is well-formed."""
    return [text for element in ElementTree.fromstring(svg).iter("text") for text in element.itertext() if text.strip()]


def test_takes_its_colours_from_the_page() -> None:
    svg = drawn(chart("original", "result"))
    assert not re.search(r"#00000[1-5]", svg)
    for name in COLOURS.values():
        assert f"var(--{name})" in svg
    assert set(re.findall(r"(?:fill|stroke): (#\w+)", svg)) == set()


def test_brings_no_size_no_style_and_no_names_of_its_own() -> None:
    svg = drawn(chart("original", "result"))
    assert svg.startswith('<svg viewBox="0 0 900 430" ')
    assert not re.search(r"<style|<metadata|<\?xml|<!DOCTYPE|<g id=|xmlns", svg)
    other = tradeoff_svg(chart("original", "result"), width=900, height=430, salt="y")
    names = [set(re.findall(r' id="([^"]+)"', one)) for one in (svg, other)]
    assert names[0]
    assert not names[0] & names[1]


@pytest.mark.parametrize(
    "label",
    [
        "$\\frac{a}",
        "a < b & c > d",
        '"><script>',
        "x\x00y\x1b[31m",
        "\ud800",
        "日本語 עברית",
        "w" * 400,
        "",
        " ",
        "{x}",
    ],
)
def test_any_label_is_drawn_as_text(label: str) -> None:
    assert len(texts(drawn(chart("original", label)))) >= 6


def test_labels_say_name_and_size() -> None:
    found = texts(drawn(chart("original float32", "result float32")))
    assert {"original float32", "result float32", "100 MB", "noise floor"} <= set(found)
    assert not any("MB" in text for text in texts(drawn(chart("original", size=None))))


def test_narrow_charts_break_their_labels() -> None:
    assert "bfloat16" in texts(drawn(chart("original bfloat16"), 350, 400))


@pytest.mark.parametrize("count", [1, 2, 12])
def test_points_in_one_place_can_be_drawn(count: int) -> None:
    same = tuple(Point(f"variant {i}", False, value(1.0), value(0.0), 0.0) for i in range(count))
    drawn(Tradeoff("time", Quality("KL", "nats", False, {}), same, ""))


def test_boxes_overlap_by_the_area_both_cover() -> None:
    assert Box(0, 0, 4, 2).overlap(Box(3, 1, 4, 2)) == pytest.approx(1.0)
    assert Box(0, 0, 4, 2).overlap(Box(9, 0, 4, 2)) == 0.0


def test_accuracy_over_all_tasks_is_what_counts_where_it_was_measured() -> None:
    found = tradeoff(rich_report())
    assert found is not None
    assert found.quality.name == "accuracy, all tasks"
    assert {point.quality.value for point in found.points} == {54.3, 52.6}
    assert {point.label for point in found.points if point.original} == {"original float32", "original bfloat16"}
    assert {point.size for point in found.points if not point.original} == {117.203344}


def test_only_one_workload_is_drawn() -> None:
    found = tradeoff(rich_report())
    assert found is not None
    assert len(found.points) == 4
    assert "batch 1" in found.conditions


def test_closeness_stands_in_for_accuracy() -> None:
    found = tradeoff(sample_report())
    assert found is not None
    assert found.quality.floor == 98.93
    original, result = (next(p for p in found.points if p.original is of) for of in (True, False))
    assert original.quality.value == 100.0
    assert (result.quality.low, result.quality.value, result.quality.high) == (85.5, 86.314, 87.1)


def test_kl_is_better_when_lower() -> None:
    found = tradeoff(sample_report([paired("kl.mean", 0.08, 0.07, 0.09), *latency()]))
    assert found is not None
    assert not found.quality.higher


def test_encoders_have_their_forward_pass() -> None:
    times = [around("latency.forward", subject, 9.0, 0.01, variant=subject) for subject in ("original", "result")]
    found = tradeoff(sample_report([paired("cosine.mean", 0.99, 0.98, 0.995), *times]))
    assert found is not None
    assert found.time_name == "time of a forward pass"


@pytest.mark.parametrize("measurements", [fidelity(), latency(), [], [Measurement("latency.tpot", "result", None)]])
def test_no_chart_without_both_times_and_quality(measurements: list[Measurement]) -> None:
    assert tradeoff(sample_report(measurements, ())) is None
