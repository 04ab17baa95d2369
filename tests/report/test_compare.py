from __future__ import annotations

import random
from typing import Any

import pytest
from sample_report import GATES, moved, sample_report, task_report

from compress.errors import UsageError
from compress.report.comparison.compare import Comparison, MetricChange, compare, parse_tolerances
from compress.report.schema import IntervalPart, Report


def status(found: Comparison, name: str) -> str:
    return change(found, name).status


def change(found: Comparison, name: str) -> MetricChange:
    return next(one for one in found.metrics if one.name == name)


def on_machine(report: Report, **changes: Any) -> Report:
    return report.model_copy(update={"environment": report.environment | changes})


def test_a_report_is_the_same_as_itself() -> None:
    found = compare(task_report(), task_report())
    assert {one.status for one in found.metrics} == {"same"}
    assert (found.exit_code, found.headline) == (0, "NO REGRESSION")
    assert not found.missing
    assert not found.added


@pytest.mark.parametrize(
    ("by", "expected", "code"), [(0.02, "worse", 3), (-0.02, "better", 0), (0.002, "within noise", 0)]
)
def test_a_change_counts_where_its_interval_leaves_no_doubt(by: float, expected: str, code: int) -> None:
    found = compare(sample_report(), moved(sample_report(), "kl.mean", by))
    assert status(found, "kl.mean") == expected
    assert found.exit_code == code


def test_higher_can_be_better() -> None:
    found = compare(sample_report(), moved(sample_report(), "top1.agreement", -5))
    assert status(found, "top1.agreement") == "worse"
    assert "top1.agreement went from 86.31 % to 81.31 %" in found.headline


def test_the_interval_of_a_difference_is_that_of_two_independent_estimates() -> None:
    before = sample_report()
    found = change(compare(before, moved(before, "kl.mean", 0.01)), "kl.mean").difference
    below, above = 0.07812 - 0.0751, 0.0812 - 0.07812
    half = (below**2 + above**2) ** 0.5
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(0.01 - half), pytest.approx(0.01 + half))


def test_a_gate_that_passed_and_fails() -> None:
    report = sample_report()
    gates = list(report.verdict.gates)
    gates[0] = gates[0].model_copy(update={"outcome": "FAIL"})
    after = report.model_copy(update={"verdict": report.verdict.model_copy(update={"gates": tuple(gates)})})
    found = compare(report, after)
    assert found.regressions == ("gate `kl.mean <= 0.1` was PASS and is FAIL",)
    assert compare(after, report).exit_code == 0
    assert compare(after, after).exit_code == 0


def test_a_verdict_that_can_no_longer_be_decided() -> None:
    passing = sample_report(gates=("kl.mean <= 1",))
    noisy = sample_report(gates=("kl.mean <= 1",), noise="the machine is too noisy")
    found = compare(passing, noisy)
    assert found.exit_code == 4
    assert found.undecided == ("the verdict was PASS and is INCONCLUSIVE",)


def test_a_gate_that_is_no_longer_asked_leaves_it_open() -> None:
    assert compare(sample_report(), sample_report(gates=GATES[:2])).exit_code == 0, "this one had failed"
    found = compare(sample_report(), sample_report(gates=GATES[1:]))
    assert f"gate `{GATES[0]}` passed and is no longer asked" in found.undecided
    assert found.exit_code == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu": "another"},
        {"versions": {"torch": "9.9", "transformers": "5.24.0"}},
        {"threads": {"torch": 1}},
        {"cpu": None},
    ],
)
def test_times_of_two_machines_are_not_compared(changes: dict[str, Any]) -> None:
    slow = moved(on_machine(sample_report(), **changes), "latency.tpot.ratio", 5)
    found = compare(sample_report(), slow)
    timed = [one for one in found.metrics if one.name.startswith(("latency", "memory"))]
    assert {one.status for one in timed} == {"not comparable"}
    assert any("times and memory are not compared" in note for note in found.notes)
    assert status(found, "kl.mean") == "same"
    assert found.exit_code == 0


def test_times_of_one_machine_are() -> None:
    found = compare(sample_report(), moved(sample_report(), "latency.tpot.ratio", 0.5))
    assert found.exit_code == 3


def test_the_result_s_own_times_never_count() -> None:
    found = compare(sample_report(), moved(sample_report(), "latency.tpot", 50, subject="result"))
    assert status(found, "latency.tpot of result") == "worse"
    assert found.exit_code == 0


def test_two_definitions_are_not_compared() -> None:
    report = sample_report()
    parts = tuple(
        part.model_copy(update={"definition_id": "kl.mean/7"}) if part.metric == "kl.mean" else part
        for part in moved(report, "kl.mean", 9).measurements
    )
    found = compare(report, report.model_copy(update={"measurements": parts}))
    assert change(found, "kl.mean").reason == "two definitions: kl.mean/1 and kl.mean/7"
    assert found.exit_code == 0


def test_other_texts_items_and_originals_are_not_compared() -> None:
    report = task_report()
    text = report.inputs.model_copy(update={"evaluation": {"text_sha256": "other"}})
    assert status(compare(report, report.model_copy(update={"inputs": text})), "kl.mean") == "not comparable"
    tasks = (report.tasks[0].model_copy(update={"sha256": "other"}), *report.tasks[1:])
    found = compare(report, report.model_copy(update={"tasks": tasks}))
    assert change(found, "accuracy[next_sentence].drop").reason == "other items"
    assert status(found, "accuracy[arithmetic].drop") == "same"
    assert change(found, "accuracy.drop").reason == "other tasks or items"
    model = report.inputs.model.model_copy(update={"content_hash": "other"})
    found = compare(report, report.model_copy(update={"inputs": report.inputs.model_copy(update={"model": model})}))
    assert change(found, "kl.mean").reason == "another original"
    assert change(found, "size of result").reason == "another original"


def test_counts_are_exact_up_to_what_headers_grow() -> None:
    report = sample_report()
    for by, expected in ((0.05, "within tolerance"), (0.5, "worse"), (-0.5, "better")):
        assert status(compare(report, moved(report, "size", by, subject="result")), "size of result") == expected


def test_what_has_no_interval_is_not_decided_without_a_tolerance() -> None:
    report = task_report()
    more = moved(report, "accuracy.losses", 3, task="arithmetic")
    assert status(compare(report, more), "accuracy[arithmetic].losses") == "not decided"
    for allowed, expected in ((5.0, "within tolerance"), (1.0, "worse")):
        found = compare(report, more, tolerances={"accuracy.losses": allowed})
        assert status(found, "accuracy[arithmetic].losses") == expected


def test_tolerance_must_be_exceeded() -> None:
    worse = moved(sample_report(), "kl.mean", 0.02)
    assert compare(sample_report(), worse, tolerances={"kl.mean": 0.019}).exit_code == 3
    assert compare(sample_report(), worse, tolerances={"kl.mean": 0.021}).exit_code == 0


def test_what_only_one_report_has_is_said() -> None:
    found = compare(sample_report(), task_report())
    assert "accuracy[arithmetic].drop" in found.added
    assert compare(task_report(), sample_report()).missing == found.added


def test_many_figures_without_a_change_seldom_raise_an_alarm() -> None:
    """Two runs of one model: 20 independent figures, each estimated anew. At most 9 of 100 may end with 3."""
    rng = random.Random(7)
    template = next(part for part in sample_report().measurements if part.metric == "kl.mean")

    def run() -> Report:
        parts = []
        for i in range(20):
            value = rng.gauss(0.5, 0.01)
            ends = IntervalPart(low=value - 0.0196, high=value + 0.0196, level=0.95, method="normal")
            update = {"value": value, "interval": ends, "conditions": {"batch": i}}
            parts.append(template.model_copy(update=update))
        return sample_report([], ()).model_copy(update={"measurements": tuple(parts)})

    alarms = sum(compare(run(), run()).exit_code == 3 for _ in range(100))
    assert alarms <= 9


def test_tolerances_are_read_with_their_units() -> None:
    assert parse_tolerances(["size=2MB", "kl.mean=0.01", "latency.ttft=1s"]) == {
        "size": 2.0,
        "kl.mean": 0.01,
        "latency.ttft": 1000.0,
    }


@pytest.mark.parametrize("word", ["size", "size=2", "size=-2MB", "sise=2MB", "kl.mean=", "=3", "kl.mean=nan"])
def test_a_tolerance_that_is_none(word: str) -> None:
    with pytest.raises(UsageError):
        parse_tolerances([word])


def test_sizes_of_models_with_other_originals_say_nothing() -> None:
    before = sample_report()
    model = before.inputs.model.model_copy(update={"content_hash": "another"})
    other = before.model_copy(update={"inputs": before.inputs.model_copy(update={"model": model})})
    larger = moved(moved(other, "size", 1000, subject="original"), "size", 1000, subject="result")
    found = compare(before, larger)
    assert found.exit_code == 0
    assert {one.status for one in found.metrics if one.name.startswith("size")} == {"not comparable"}


def test_only_the_result_can_grow_too_large() -> None:
    before = sample_report()
    assert compare(before, moved(before, "size", 1000, subject="result")).exit_code == 3
    assert compare(before, moved(before, "size", 1000, subject="original")).exit_code == 0
