from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from compress.recipe.gates import parse_gate
from compress.records import Measurement
from compress.verdict import GateResult, Outcome, Verdict, judge

PASS, FAIL, INCONCLUSIVE = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE


def measured(
    metric: str,
    value: float | None,
    bounds: tuple[float, float] | None = None,
    subject: str = "result/original",
    conditions: Mapping[str, Any] | None = None,
    note: str | None = None,
) -> Measurement:
    one_sided = {0.95: bounds} if bounds else {}
    return Measurement(metric, subject, value, one_sided=one_sided, conditions=conditions or {}, note=note)


def one(gate: str, *measurements: Measurement) -> GateResult:
    (result,) = judge([parse_gate(gate)], measurements).gates
    return result


@pytest.mark.parametrize(
    ("op", "value", "outcome"),
    [
        ("<=", 0.1, PASS),
        ("<", 0.1, FAIL),
        (">=", 0.1, PASS),
        (">", 0.1, FAIL),
        ("<=", math.nextafter(0.1, 1), FAIL),
        ("<", math.nextafter(0.1, 0), PASS),
        (">=", math.nextafter(0.1, 0), FAIL),
        (">", math.nextafter(0.1, 1), PASS),
    ],
)
def test_the_point_estimate_is_compared_unrounded(op: str, value: float, outcome: Outcome) -> None:
    result = one(f"kl.mean {op} 0.1", measured("kl.mean", value, bounds=(0.0, 9.0)))
    assert result.outcome is outcome
    assert repr(value) in result.reason


@pytest.mark.parametrize(
    ("gate", "bounds", "outcome"),
    [
        ("kl.mean <= 0.1 @95%", (0.05, 0.10), PASS),
        ("kl.mean <= 0.1 @95%", (0.05, 0.11), INCONCLUSIVE),
        ("kl.mean <= 0.1 @95%", (0.10, 0.11), INCONCLUSIVE),
        ("kl.mean <= 0.1 @95%", (0.101, 0.11), FAIL),
        ("kl.mean < 0.1 @95%", (0.05, 0.10), INCONCLUSIVE),
        ("kl.mean < 0.1 @95%", (0.05, 0.099), PASS),
        ("kl.mean < 0.1 @95%", (0.10, 0.11), FAIL),
        ("top1.agreement >= 80% @95%", (80.0, 90.0), PASS),
        ("top1.agreement >= 80% @95%", (79.0, 90.0), INCONCLUSIVE),
        ("top1.agreement >= 80% @95%", (70.0, 79.9), FAIL),
        ("top1.agreement > 80% @95%", (80.0, 90.0), INCONCLUSIVE),
        ("top1.agreement > 80% @95%", (70.0, 80.0), FAIL),
        ("kl.mean <= 0.1 @95%", (0.0, math.inf), INCONCLUSIVE),
        ("kl.mean <= 0.1 @95%", (math.nan, math.nan), INCONCLUSIVE),
    ],
)
def test_a_level_needs_the_whole_bound_on_one_side(gate: str, bounds: tuple[float, float], outcome: Outcome) -> None:
    assert one(gate, measured(gate.split()[0], 0.1, bounds)).outcome is outcome


def test_the_reason_names_the_bound_that_decided() -> None:
    gate = "kl.mean <= 0.1 @95%"
    assert one(gate, measured("kl.mean", 0.07, (0.05, 0.08))).reason == (
        "the upper 95% bound of kl.mean is 0.08, <= 0.1"
    )
    assert one(gate, measured("kl.mean", 0.2, (0.15, 0.3))).reason == (
        "the lower 95% bound of kl.mean is 0.15, not <= 0.1"
    )
    assert one(gate, measured("kl.mean", 0.1, (0.05, 0.3))).reason == (
        "the bounds of kl.mean, 0.05 and 0.3 at 95% each, lie on both sides of 0.1"
    )


def test_a_level_without_a_bound_is_inconclusive() -> None:
    result = one("kl.mean <= 0.1 @99%", measured("kl.mean", 0.01, (0.0, 0.02)))
    assert (result.outcome, result.reason) == (INCONCLUSIVE, "kl.mean has no one-sided 99% bound")


def test_what_was_not_measured_never_passes() -> None:
    result = one("kl.mean <= 0.1", measured("kl.median", 0.01))
    assert (result.outcome, result.measurement) == (INCONCLUSIVE, None)
    assert result.reason == "kl.mean was not measured"
    result = one("kl.mean <= 0.1", measured("kl.mean", None, note="the vocabularies differ"))
    assert result.outcome is INCONCLUSIVE
    assert result.reason == "kl.mean could not be measured: the vocabularies differ"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("gate", ["kl.mean <= 0.1", "kl.mean >= 0.1", "kl.mean <= 0.1 @95%"])
def test_a_number_that_is_not_finite_fails(gate: str, value: float) -> None:
    assert one(gate, measured("kl.mean", value, (0.0, 0.01))).outcome is FAIL


def test_the_original_is_never_judged() -> None:
    original = measured("size", 50.0, subject="original")
    assert one("size <= 100MB", original).outcome is INCONCLUSIVE
    assert one("size <= 100MB", original, measured("size", 120.0, subject="result")).outcome is FAIL


def test_memory_is_judged_in_its_worst_variant() -> None:
    small = measured("memory.peak", 20.0, subject="result", conditions={"variant": "result bfloat16"})
    large = measured("memory.peak", 25.0, subject="result", conditions={"variant": "result float32"})
    result = one("memory.peak <= 30MB", large, small)
    assert result.measurement is large
    assert result.reason == "memory.peak is 25MB, <= 30MB (the worst of 2 measurements: result float32)"
    unknown = measured("memory.peak", None, subject="result")
    assert one("memory.peak <= 30MB", small, unknown).outcome is INCONCLUSIVE
    assert one("memory.peak <= 22MB", small, unknown, large).measurement is large


def test_latency_is_judged_as_one_would_run_it() -> None:
    def ratio(value: float | None, variant: str, comparison: str) -> Measurement:
        conditions = {"variant": variant, "original": "original bfloat16", "comparison": comparison}
        return measured("latency.tpot.ratio", value, conditions=conditions)

    flattering = ratio(0.5, "result float32", "same dtype")
    fair = ratio(1.2, "result float32", "fastest original")
    best = ratio(1.1, "result bfloat16", "same dtype, which is the fastest original")
    result = one("latency.tpot.ratio <= 1.15x", flattering, fair, best)
    assert result.measurement is best
    assert result.outcome is PASS
    assert "the fastest of 3 comparisons: result bfloat16, original bfloat16" in result.reason
    broken = ratio(math.nan, "result float32", "fastest original")
    assert one("latency.tpot.ratio <= 1.15x", best, broken).outcome is FAIL
    unknown = ratio(None, "result float32", "fastest original")
    assert one("latency.tpot.ratio <= 1.15x", best, unknown).measurement is best


def verdict(*values: float | None) -> Verdict:
    metrics = ("kl.mean", "kl.median", "kl.p99")[: len(values)]
    gates = [parse_gate(f"{metric} <= 0.1") for metric in metrics]
    return judge(gates, [measured(metric, value) for metric, value in zip(metrics, values, strict=True)])


@pytest.mark.parametrize(
    ("values", "outcome", "code", "headline"),
    [
        ((), PASS, 0, "PASS: no gate was asked, so nothing was judged"),
        ((0.05,), PASS, 0, "PASS: the gate passed"),
        ((0.05, 0.06), PASS, 0, "PASS: all 2 gates passed"),
        ((0.05, 0.2), FAIL, 3, "FAIL: 1 of 2 gates failed: kl.median is 0.2, not <= 0.1"),
        ((None, 0.2, 0.05), FAIL, 3, "FAIL: 1 of 3 gates failed: kl.median is 0.2, not <= 0.1"),
        (
            (None, 0.05),
            INCONCLUSIVE,
            4,
            "INCONCLUSIVE: 1 of 2 gates could not be decided: kl.mean could not be measured: no reason was recorded",
        ),
    ],
)
def test_one_verdict(values: tuple[float | None, ...], outcome: Outcome, code: int, headline: str) -> None:
    found = verdict(*values)
    assert (found.outcome, found.exit_code, found.headline) == (outcome, code, headline)
    assert [result.gate.metric for result in found.gates] == ["kl.mean", "kl.median", "kl.p99"][: len(values)]


def test_large_numbers_are_written_out() -> None:
    result = one("parameters <= 100000000", measured("parameters", 134_515_008.0, subject="result"))
    assert result.reason == "parameters is 134515008, not <= 100000000"


def accuracy(value: float, bounds: tuple[float, float], task: str | None, count: int = 100) -> Measurement:
    return Measurement("accuracy.drop", "result/original", value, count, one_sided={0.95: bounds}, task=task)


def test_a_gate_without_a_task_judges_all_tasks_pooled() -> None:
    found = [accuracy(9.0, (8.0, 10.0), "a"), accuracy(1.0, (0.5, 1.5), "b"), accuracy(2.0, (1.0, 3.0), None)]
    assert one("accuracy.drop <= 4pt @95%", *found).outcome is PASS
    assert one("accuracy[a].drop <= 4pt @95%", *found).outcome is FAIL
    assert one("accuracy[b].drop <= 4pt @95%", *found).outcome is PASS
    missing = one("accuracy[c].drop <= 4pt", *found)
    assert (missing.outcome, missing.reason) == (INCONCLUSIVE, "accuracy[c].drop was not measured")


def test_what_is_not_decided_says_how_many_items_would() -> None:
    result = one("accuracy.drop <= 3pt @95%", accuracy(2.0, (0.0, 4.0), None))
    assert result.outcome is INCONCLUSIVE
    assert result.reason.endswith("there are 100 items, about 400 would decide if the estimate stays there")
    hopeless = one("accuracy.drop <= 2pt @95%", accuracy(2.0, (0.0, 4.0), None))
    assert "no affordable number would decide" in hopeless.reason


def test_of_several_workloads_the_worst_counts_each_at_its_fastest() -> None:
    def ratio(value: float, batch: int, variant: str) -> Measurement:
        conditions = {
            "batch": batch,
            "prompt": 8,
            "new_tokens": 4,
            "variant": variant,
            "comparison": "fastest original",
        }
        return measured("latency.tpot.ratio", value, conditions=conditions)

    found = [ratio(0.8, 1, "float32"), ratio(0.5, 1, "bfloat16"), ratio(1.4, 4, "float32"), ratio(1.1, 4, "bfloat16")]
    result = one("latency.tpot.ratio <= 1x", *found)
    assert result.outcome is FAIL
    assert result.measurement == found[3]
    assert "the worst of 2 workloads" in result.reason
    assert "batch 4" in result.reason


def test_noise_has_the_last_word_where_nothing_is_worse() -> None:
    quiet = [measured("kl.mean", 0.05)]
    gate, bad = parse_gate("kl.mean <= 0.1"), parse_gate("kl.mean <= 0.01")
    noisy = judge([gate], quiet, "machine too noisy for 2%: about 90 blocks would be needed")
    assert (noisy.outcome, noisy.exit_code) == (INCONCLUSIVE, 8)
    assert noisy.headline.startswith("INCONCLUSIVE: machine too noisy for 2%")
    assert judge([], [], "machine too noisy").exit_code == 8
    failed = judge([gate, bad], quiet, "machine too noisy")
    assert (failed.outcome, failed.exit_code) == (FAIL, 3)
    assert failed.headline.startswith("FAIL: ")
    assert "machine too noisy" in failed.headline
    open_gate = judge([parse_gate("kl.p99 <= 1")], quiet, "machine too noisy")
    assert (open_gate.outcome, open_gate.exit_code) == (INCONCLUSIVE, 4)
