from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from sample_report import OUTPUT, fidelity, sample_measurements, sample_report

from compress.metrics import METRICS
from compress.records import Interval, LayerRecord, Measurement, StepRecord
from compress.report.build import layer_part, measurement_part, plain, step_part
from compress.report.remarks import remarks
from compress.report.schema import Report, report_json


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_report_survives_the_file() -> None:
    report = sample_report()
    assert Report.model_validate_json(report_json(report)) == report


def test_every_number_has_unit_and_definition() -> None:
    for part in sample_report().measurements:
        assert part.unit == METRICS[part.metric].unit
        assert part.definition == METRICS[part.metric].definition


def test_stored_values_are_never_rounded() -> None:
    stored = [part.value for part in sample_report().measurements]
    assert stored == [m.value for m in sample_measurements()]
    assert 117.203344 / 269.060552 in stored


def test_json_has_no_nan() -> None:
    broken = [
        Measurement("kl.mean", "result/original", math.nan, conditions={"loss": math.inf}),
        Measurement(
            "perplexity.ratio",
            "result/original",
            1.0,
            interval=Interval(math.nan, 1.1, 0.95, "bootstrap"),
            one_sided={0.95: (-math.inf, 1.1)},
        ),
    ]
    text = report_json(sample_report([*fidelity()[:3], *broken]))
    data = json.loads(text, parse_constant=refuse_constant)
    kl, ratio = data["measurements"][-2:]
    assert kl["value"] is None
    assert kl["note"] == "the value was not a finite number"
    assert kl["conditions"] == {"loss": None}
    assert ratio["interval"] is None
    assert ratio["one_sided"] == [{"level": 0.95, "lower": None, "upper": 1.1}]


def test_a_lost_value_keeps_its_own_note() -> None:
    part = measurement_part(Measurement("kl.mean", "result", math.inf, note="first window only"))
    assert part.note == "first window only; the value was not a finite number"


def test_layer_errors_that_are_not_finite_become_notes() -> None:
    part = layer_part(LayerRecord("a.b", (2, 3), error_after=math.nan, error_before=0.5, notes=("dead column",)))
    assert part.error_after is None
    assert part.error_before == 0.5
    assert part.notes == ("dead column", "error_after was not a finite number")


def test_totals_count_the_layers() -> None:
    step = StepRecord(
        "quantize",
        {"algorithm": "gptq"},
        layers=(
            LayerRecord("a", (2, 2), algorithm="gptq"),
            LayerRecord("b", (2, 2), algorithm="rtn"),
            LayerRecord("c", (2, 2), skipped="tied"),
        ),
        calibration={"tokens_used": 4096},
    )
    totals = step_part(step).totals
    assert (totals.layers_quantized, totals.layers_skipped, totals.layers_fallback) == (2, 1, 1)
    assert totals.calibration_tokens == 4096


def test_gates_carry_what_was_asked_and_judged() -> None:
    size, ratio = sample_report().verdict.gates[1:3]
    assert (size.expression, size.value, size.threshold, size.unit) == ("size <= 120MB", 117.203344, 120.0, "MB")
    assert size.bound is None
    assert ratio.level == 0.95
    assert ratio.bound is not None
    assert ratio.bound.lower == pytest.approx(1.0581 * 1.005)
    assert ratio.line == 23


def test_a_gate_on_what_was_not_measured_has_no_value() -> None:
    (gate,) = sample_report(fidelity(), ("latency.ttft <= 50ms",)).verdict.gates
    assert gate.value is None
    assert gate.outcome == "INCONCLUSIVE"


def test_plain_makes_json_of_anything() -> None:
    value = {Path("a"): (1, 2.5, math.nan), "set": {"b", "a"}, "none": None, "yes": True}
    assert plain(value) == {"a": [1, 2.5, None], "set": ["a", "b"], "none": None, "yes": True}


def test_report_is_frozen_and_refuses_unknown_keys() -> None:
    report = sample_report()
    with pytest.raises(ValidationError, match="frozen"):
        report.output = "elsewhere"
    with pytest.raises(ValidationError, match="extra_forbidden"):
        Report.model_validate(report.model_dump() | {"extra": 1})


def test_another_schema_version_is_refused() -> None:
    text = report_json(sample_report()).replace('"schema_version": 2', '"schema_version": 1')
    with pytest.raises(ValidationError, match="schema_version"):
        Report.model_validate_json(text)


def remarks_of(*measurements: Measurement, proved: bool = True) -> str:
    return "\n".join(sample_report(list(measurements), (), proved=proved).remarks)


def ratio(value: float, low: float, high: float, **conditions: str) -> Measurement:
    interval = Interval(low, high, 0.95, "bootstrap")
    return Measurement("latency.tpot.ratio", "result/original", value, 20, interval, conditions=conditions)


def test_no_remark_on_speed_when_it_is_faster() -> None:
    assert "faster" not in remarks_of(ratio(0.8, 0.75, 0.85)).replace("that the result is faster", "")


def test_not_faster_is_said_with_the_reason() -> None:
    text = remarks_of(ratio(0.99, 0.96, 1.02))
    assert "not faster: each further token takes 0.990x the original's time [0.960, 1.020]" in text
    assert "expands these weights to dense matrices" in text


def test_slower_is_said() -> None:
    text = remarks_of(ratio(1.1, 1.0, 1.2), ratio(1.2, 1.15, 1.25))
    assert "slower: each further token takes 1.200x the original's time [1.150, 1.250]" in text


def test_the_fastest_original_is_the_one_to_beat() -> None:
    same = ratio(0.7, 0.65, 0.75, dtype="float32", original_dtype="float32", comparison="same dtype")
    best = ratio(1.3, 1.2, 1.4, dtype="float32", original_dtype="bfloat16", comparison="fastest original")
    assert "(result in float32, original in bfloat16)" in remarks_of(same, best)


def test_missing_measurements_and_proof_are_said() -> None:
    text = remarks_of(fidelity()[0], proved=False)
    assert "not proved" in text
    assert "accuracy was not measured" in text
    assert "speed was not measured" in text


def test_what_is_not_the_job_of_a_command_is_not_missed() -> None:
    size = (measurement_part(fidelity()[0]),)
    for command, missed in (("run", 3), ("eval", 1), ("bench", 1)):
        assert len(remarks(size, (), format_name=None, proved=False, command=command)) == missed


def test_what_lacks_a_value_is_told_once_for_each_reason() -> None:
    kinds = [("kl.p99", "too few tokens"), ("kl.p999", "too few tokens"), ("ndcg", "no titles")]
    parts = [measurement_part(Measurement(metric, "result", None, note=note)) for metric, note in kinds]
    tails = [Measurement(f"latency.ttft.{p}", "result", None, note="needs 29 values") for p in ("p90", "p99")]
    lines = remarks([*parts, *map(measurement_part, tails)], (), format_name=None, proved=True)
    assert "kl.p99 of result, kl.p999 of result have no value: too few tokens" in lines
    assert "ndcg of result has no value: no titles" in lines
    assert [line for line in lines if "percentiles" in line] == [
        "2 of 2 percentiles of times have no value, as the samples are too small: "
        "latency.ttft.p90 of result needs 29 values"
    ]


def test_memory_that_did_not_shrink_is_said() -> None:
    size = Measurement("size.ratio", "result/original", 0.5)
    peaks = [Measurement("memory.peak", subject, value) for subject, value in (("original", 640.0), ("result", 655.0))]
    assert "smaller on disk, not in memory" in remarks_of(size, *peaks)
    assert "in memory" not in remarks_of(size, peaks[0], replace(peaks[1], value=300.0))
    assert "in memory" not in remarks_of(size, peaks[0], replace(peaks[1], value=641.0)), (
        "as much as two processes differ"
    )
    assert "in memory" not in remarks_of(replace(size, value=1.2), *peaks), "it is not smaller on disk"


def test_a_floor_that_shows_a_difference_is_said() -> None:
    def floor(low: float, high: float) -> Measurement:
        interval = Interval(low, high, 0.95, "signed rank")
        return Measurement("latency.tpot.ratio", "original/original", (low + high) / 2, 20, interval)

    assert "the original against itself shows 0.94" in remarks_of(floor(0.90, 0.98))
    assert "itself" not in remarks_of(floor(0.97, 1.01))


def refined(steps: int, *notes: str) -> str:
    layers = tuple(LayerRecord(f"layer.{index}", (4, 4), notes=("other", note)) for index, note in enumerate(notes))
    step = StepRecord("quantize", {"algorithm": "gptq", "refine": steps}, layers)
    return "\n".join(remarks((), [step], format_name="gptq", proved=True))


def test_what_refinement_brought_is_said() -> None:
    kept, dropped = "refined: the error 0.2 -> 0.1", "refinement dropped: the error 0.1 -> 0.2"
    assert "refine" not in refined(0, "")
    assert "refinement (9 steps) was kept in blocks with 2 of 2 layers" in refined(9, kept, kept)
    assert "in the others" not in refined(9, kept, kept)
    text = refined(9, kept, dropped, dropped)
    assert "refinement (9 steps) was kept in blocks with 1 of 3 layers; in the others, windows that" in text


def test_what_took_factors_over_is_said_once_for_each() -> None:
    producers = ("input_layernorm", "input_layernorm", "mlp.up_proj", None)
    layers = tuple(
        LayerRecord(f"layer.{index}", (4, 4), smoothing=None if name is None else {"producer": name})
        for index, name in enumerate(producers)
    )
    step = StepRecord("quantize", {"algorithm": "rtn"}, layers)
    assert "folded into 2 norms and earlier layers" in "\n".join(remarks((), [step], format_name="gptq", proved=True))


def test_output_is_as_the_user_named_it() -> None:
    assert sample_report().output == OUTPUT
