from __future__ import annotations

import json

from sample_report import fidelity, sample_measurements, sample_report, task_report

from compress.records import Measurement
from compress.report.flat import flat_metrics, metrics_json
from compress.report.schema import Report


def swept() -> Report:
    ratios = [
        Measurement(
            "latency.tpot.ratio", "result/original", value, conditions={"dtype": dtype, "batch": batch} | comparison
        )
        for dtype, batch, value, comparison in (
            ("float32", 1, 0.8, {"comparison": "same dtype"}),
            ("bfloat16", 1, 0.9, {"comparison": "fastest original"}),
            ("bfloat16", 8, 0.5, {"comparison": "fastest original"}),
        )
    ]
    floors = [
        Measurement("kl.mean", "original/original", value, conditions={"comparison": name})
        for name, value in (("batch layout", 1e-9), ("bfloat16", 1e-4))
    ]
    return sample_report([*ratios, *floors], ())


def test_keys_name_metric_task_and_subject() -> None:
    flat = flat_metrics(task_report())
    assert flat["verdict"] == "FAIL"
    assert flat["exit_code"] == 3
    assert (flat["gates.passed"], flat["gates.failed"], flat["gates.inconclusive"]) == (3, 2, 0)
    assert flat["kl.mean"] == 0.07812
    assert (flat["kl.mean.low"], flat["kl.mean.high"]) == (0.0751, 0.0812)
    assert flat["floor.kl.mean"] == 0.00031
    assert flat["original.size"] == 269.060552
    assert flat["result.size"] == 117.203344
    assert flat["accuracy[next_sentence].drop"] == 1.2
    assert flat["original.accuracy[next_sentence]"] == 54.2
    assert flat["accuracy.drop.high"] == 1.2 + 1.1
    assert flat["tasks[next_sentence].items"] == 1000


def test_every_number_is_there_unrounded() -> None:
    values = list(flat_metrics(sample_report()).values())
    for measurement in sample_measurements():
        assert measurement.value in values


def test_of_several_ways_the_plain_key_is_the_fair_one_of_the_first_workload() -> None:
    flat = flat_metrics(swept())
    assert flat["latency.tpot.ratio"] == 0.9
    assert flat["latency.tpot.ratio@float32,batch 1"] == 0.8
    assert flat["latency.tpot.ratio@bfloat16,batch 8"] == 0.5


def test_what_conditions_do_not_tell_apart_is_told_apart_all_the_same() -> None:
    flat = flat_metrics(swept())
    assert flat["floor.kl.mean@batch layout"] == 1e-9
    assert flat["floor.kl.mean@bfloat16"] == 1e-4


def test_of_absolute_times_the_fastest_dtype_stands_for_the_model() -> None:
    flat = flat_metrics(sample_report())
    assert flat["original.latency.tpot"] == 16.31
    assert flat["original.memory.peak"] == 640.2


def test_what_could_not_be_measured_is_null() -> None:
    report = sample_report([*fidelity(), Measurement("kl.p999", "result/original", None, note="too few")], ())
    assert json.loads(metrics_json(report))["kl.p999"] is None


def test_file_is_flat() -> None:
    data = json.loads(metrics_json(task_report()))
    assert all(value is None or isinstance(value, int | float | str) for value in data.values())
