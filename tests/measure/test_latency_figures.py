"""Figures of a finished run: comparisons, tails, throughput, CPU time, raw rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated import ENCODER, Machine, measurements, one, run, steady, timing_of

from compress.measure.latency.contention import held_up_seconds
from compress.measure.latency.figures import latency_measurements, load_measurements
from compress.measure.latency.raw import LatencyRaw, Loaded
from compress.measure.latency.schedule import Run, Sample, run_protocol
from compress.measure.latency.settings import Variant, Workload
from compress.metrics import METRICS
from compress.progress import Silent

PAIR = (("original", "float32"), ("result", "float32"))


def decoding(machine: Machine, new_tokens: int) -> Run:
    """Each forward pass is a prompt, each further token a tenth of it."""

    def decode(variant: int) -> Sample:
        sample = machine.sample(variant)
        first = sample.whole
        seconds = {"ttft": first, "e2e": first * (1 + (new_tokens - 1) / 10)}
        if new_tokens > 1:
            seconds["tpot"] = (seconds["e2e"] - first) / (new_tokens - 1)
        return Sample(seconds, sample.cpu_seconds, sample.contention)

    return run_protocol(2, decode, floor_of=0, budget=4.0, seed=0, clock=machine.clock, progress=Silent())


def test_results_are_compared_with_the_same_dtype_and_the_fastest_original() -> None:
    machine = Machine(steady(0.040), steady(0.020), steady(0.030), steady(0.010))
    variants = (
        ("original fp32", "float32"),
        ("original bf16", "bfloat16"),
        ("result fp32", "float32"),
        ("result fp16", "float16"),
    )
    everything = [m for m in measurements(run(machine), variants) if m.subject == "result/original"]
    for metric in ("latency.forward.ratio", "cpu.ratio"):
        found = [m for m in everything if m.metric == metric]
        table = [(m.conditions["variant"], m.conditions["original"], m.conditions["comparison"]) for m in found]
        assert table == [
            ("result fp32", "original fp32", "same dtype"),
            ("result fp32", "original bf16", "fastest original"),
            ("result fp16", "original bf16", "fastest original"),
        ]
        assert [m.conditions["original_dtype"] for m in found] == ["float32", "bfloat16", "bfloat16"]
        assert [m.value for m in found] == pytest.approx([0.75, 1.5, 0.5], rel=0.01)


def test_every_figure_is_in_the_table_and_names_its_workload() -> None:
    found = latency_measurements(timing_of(decoding(Machine(steady(0.02), steady(0.01)), 5), PAIR, DECODER))
    assert {m.metric for m in found} <= set(METRICS)
    facts = {"prompt": 8, "new_tokens": 5, "batch": 3, "dtype": "float32", "engine": "simulated"}
    assert all(facts.items() <= m.conditions.items() for m in found)
    assert {"variant", "rounds", "rounds_left_out", "loader"} <= set(found[0].conditions)


DECODER = Workload("decoder", 8, 5, 3)


def test_throughput_counts_the_tokens_of_the_whole_batch() -> None:
    found = latency_measurements(timing_of(decoding(Machine(steady(0.02), steady(0.01)), 5), PAIR, DECODER))
    for time, rate, tokens in (("ttft", "prefill", 8 * 3), ("tpot", "decode", 3)):
        seconds = one(found, f"latency.{time}", "result")
        per_second = one(found, f"throughput.{rate}", "result")
        assert per_second.value == pytest.approx(1000 * tokens / seconds.value)
        assert seconds.interval is not None
        assert per_second.interval is not None
        assert per_second.interval.low == pytest.approx(1000 * tokens / seconds.interval.high)
        assert per_second.interval.high == pytest.approx(1000 * tokens / seconds.interval.low)
        low, high = per_second.one_sided[0.95]
        assert per_second.interval.low <= low < per_second.value < high <= per_second.interval.high


def test_whole_time_has_a_ratio_too() -> None:
    found = latency_measurements(timing_of(decoding(Machine(steady(0.02), steady(0.01)), 5), PAIR, DECODER))
    assert one(found, "latency.e2e.ratio", "result/original").value == pytest.approx(0.5, rel=0.01)
    assert one(found, "latency.e2e", "result").value == pytest.approx(14.0, rel=0.02)


def test_tails_need_as_many_independent_values_as_they_ask_for() -> None:
    many = measurements(run(Machine(steady(0.02), steady(0.02)), budget=30.0))
    median, p90, p99 = (one(many, f"latency.forward{tail}", "result") for tail in ("", ".p90", ".p99"))
    assert median.count is not None
    assert median.count >= 299
    assert median.value < p90.value < p99.value
    assert p99.interval is not None or p99.one_sided == {}
    assert one(many, "latency.forward.p90", "original").interval is not None

    few = measurements(run(Machine(steady(9.0), steady(9.0)), budget=0.1))
    for tail, needed in ((".p90", 29), (".p99", 299)):
        found = one(few, f"latency.forward{tail}", "result")
        assert found.value is None
        assert found.note == f"needs {needed} independent values, there are {found.count}"
        assert found.count <= 10


def test_a_machine_that_stays_slow_for_a_while_gives_few_independent_values() -> None:
    def slow_every_other_second(_calls: int, now: float) -> float:
        return 0.02 if int(now) % 2 == 0 else 0.03

    steady_machine = measurements(run(Machine(steady(0.02), steady(0.02)), budget=6.0))
    changing = measurements(run(Machine(slow_every_other_second, slow_every_other_second), budget=6.0))
    many, few = (one(found, "latency.forward", "result") for found in (steady_machine, changing))
    assert few.count < many.count / 3
    # The ratio inside a round does not care.
    assert one(changing, "latency.forward.ratio", "result/original").value == pytest.approx(1.0, abs=0.01)


def test_cpu_time_is_compared_beside_the_time_on_the_wall() -> None:
    """Half of what others hold the CPU for hits both: the wall ratio shrinks towards 1, that of CPU time stays."""
    machine = Machine(steady(0.02), steady(0.01), held_up=lambda _now: 0.02)
    found = measurements(run(machine))
    assert one(found, "cpu.ratio", "result/original").value == pytest.approx(0.5, rel=0.01)
    assert one(found, "latency.forward.ratio", "result/original").value == pytest.approx(0.75, rel=0.01)


@pytest.mark.parametrize("told", [None, 0.0])
def test_without_a_usable_clock_of_cpu_time_there_is_no_ratio_of_it(told: float | None) -> None:
    machine = Machine(steady(0.02), steady(0.01))

    def sample(variant: int) -> Sample:
        return Sample(machine.sample(variant).seconds, told)

    done = run_protocol(2, sample, floor_of=0, budget=1, seed=0, clock=machine.clock, progress=Silent())
    ratio = one(measurements(done), "cpu.ratio", "result/original")
    assert ratio.value is None
    assert "too coarse" in (ratio.note or "")


def test_one_new_token_has_no_tpot() -> None:
    done = decoding(Machine(steady(0.01), steady(0.01)), 1)
    found = latency_measurements(timing_of(done, PAIR, Workload("decoder", 8, 1, 1), peak=None))
    for metric in ("latency.tpot", "throughput.decode"):
        missing = one(found, metric, "result")
        assert missing.value is None
        assert missing.note is not None
    assert one(found, "latency.ttft", "result").value is not None
    assert one(found, "memory.peak", "original").value is None


def test_rounds_in_which_others_held_the_cpu_are_left_out_and_counted() -> None:
    """For one second in ten, others take four fifths of the CPU; only samples in that second wait."""

    def busy(now: float) -> float:
        return 0.08 if now % 10 < 1 else 0.0

    done = run(Machine(steady(0.02), steady(0.02), held_up=busy), budget=30.0)
    timing = timing_of(done)
    ratio = one(latency_measurements(timing), "latency.forward.ratio", "result/original")
    waited = [held_up_seconds([sample.contention for _, sample in round_]) for round_ in done.rounds]
    out = ratio.conditions["rounds_left_out"]
    assert out == sum(seconds > 0 for seconds in waited) > 0
    assert ratio.conditions["rounds"] == ratio.count == len(done.rounds) - out
    assert ratio.note == f"{out} of {len(done.rounds)} rounds left out: others held the CPUs meanwhile"
    assert one(latency_measurements(timing), "latency.forward", "result").value == pytest.approx(20.0, rel=0.01)


def test_every_sample_is_a_row_in_order() -> None:
    machine = Machine(steady(0.02), steady(0.03), held_up=lambda now: 0.1 if 3 < now < 3.2 else 0.0)
    done = run(machine)
    loads = [Loaded("x", 0.25, 7), Loaded("x", 0.5, None)]
    raw = LatencyRaw({"seed": 0}, ["a", "b"], loads, [(ENCODER, done)], [[8, None]])
    rows = json.loads(json.dumps(raw.rows()))
    assert rows[0] == {"kind": "conditions", "seed": 0}
    assert rows[1:3] == [
        {"kind": "load", "variant": "a", "seconds": 0.25, "peak_bytes": 7},
        {"kind": "load", "variant": "b", "seconds": 0.5, "peak_bytes": None},
    ]
    assert [(row["kind"], row["variant"], row["bytes"]) for row in rows[3:5]] == [
        ("memory", "a", 8),
        ("memory", "b", None),
    ]
    samples = rows[5:]
    assert {row["kind"] for row in samples} == {"sample"}
    assert [("a", "b").index(row["variant"]) for row in samples] == machine.order
    assert sum(row["seconds"]["forward"] for row in samples) == pytest.approx(machine.now)
    assert list(dict.fromkeys(row["phase"] for row in samples)) == ["warm-up", "floor", "measure"]
    assert samples[0]["workload"] == {"kind": "encoder", "prompt": 128, "new_tokens": None, "batch": 1}
    assert set(samples[0]) == {
        *("kind", "workload", "phase", "round", "variant", "side", "seconds", "cpu_seconds", "contention", "left_out")
    }
    out = [row for row in samples if row["left_out"]]
    assert 0 < len(out) < len(samples) / 4
    by_round = {(row["phase"], row["round"]) for row in out}
    assert len(out) == 4 * len(by_round)


def test_load_time_belongs_to_a_variant() -> None:
    variants = [Variant("a", Path(), "stock", "float32"), Variant("b", Path(), "reference", "bfloat16")]
    loads = [Loaded("x", 0.25, 7), Loaded("y", 0.5, None)]
    found = load_measurements(variants, loads, ["a"], {"device": "cpu"})
    assert [(m.metric, m.subject, m.value, m.count) for m in found] == [
        ("latency.load", "original", 250.0, 1),
        ("latency.load", "result", 500.0, 1),
    ]
    assert found[1].conditions["engine"] == "y"
