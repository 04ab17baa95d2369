"""The worker and the whole measurement, with real processes and tiny models. No duration is asserted."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_bert, tiny_gpt2, tiny_llama, tiny_opt

from compress.errors import BrokenResultError, CompressError, MissingResourceError, UsageError
from compress.measure.latency import worker
from compress.measure.latency.children import ask, children
from compress.measure.latency.measuring import Stop, Timed, Variant, Workload, measure_latency
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent


def load(folder: Path) -> torch.nn.Module:
    return load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")


DECODER = Workload("decoder", 12, 4, 1)


def measure(*variants: Variant, **changed: object) -> Timed:
    settings: dict[str, object] = {
        "original_labels": [variants[0].label],
        "workloads": [DECODER],
        "stop": Stop(0.5),
        "threads": 1,
        "seed": 0,
        "device": "cpu",
        "trust_remote_code": False,
        "progress": Silent(),
    }
    return measure_latency(variants, **(settings | changed))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_delay_in_every_forward_is_the_time_per_token(tmp_path: Path) -> None:
    """A hook that costs 300 ms in its first two calls and 5 ms always, on a clock that only the hook moves."""
    model, clock, calls = load(tiny_llama(tmp_path)), Clock(), []

    def cost(*_: object) -> None:
        clock.now += 0.005 + (0.3 if len(calls) < 2 else 0.0)
        calls.append(clock.now)

    model.register_forward_hook(cost)
    ids = torch.randint(0, 256, (1, 12))
    with torch.inference_mode():
        samples = [worker.decoder_sample(model, ids, 5, clock=clock) for _ in range(3)]
    assert samples[0]["ttft"] == pytest.approx(0.305)
    assert samples[1] == {
        "ttft": pytest.approx(0.005),
        "e2e": pytest.approx(0.025),
        "tpot": pytest.approx(0.005),
    }
    assert samples[2] == samples[1] | {name: pytest.approx(value) for name, value in samples[1].items()}


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_opt])
def test_decoding_is_greedy_cached_and_keeps_one_position(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    model, fed, kept = load(make(tmp_path)), [], []

    def watch(_module: object, _args: object, kwargs: dict[str, torch.Tensor], output: object) -> None:
        fed.append(kwargs["input_ids"])
        kept.append(output.logits.shape[1])

    ids = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(1)) + 2
    expected = ids
    with torch.inference_mode():
        for _ in range(4):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
        model.register_forward_hook(watch, with_kwargs=True)
        worker.decoder_sample(model, ids, 5, clock=Clock())
    assert [tuple(step.shape) for step in fed] == [(2, 12)] + [(2, 1)] * 4
    assert torch.equal(torch.cat(fed, dim=1), expected)
    assert kept == [1] * 5


def test_waking_up_runs_at_least_once_and_until_the_time_is_over() -> None:
    clock, calls = Clock(), []

    def forward() -> None:
        clock.now += 0.02
        calls.append(clock.now)

    worker.wake(forward, torch.device("cpu"), clock=clock)
    assert len(calls) == 2


def test_decoders_from_end_to_end(tmp_path: Path) -> None:
    original, result = tiny_llama(tmp_path / "a"), tiny_llama(tmp_path / "b", intermediate_size=64)
    timed = measure(
        Variant("original fp32", original, "stock", "float32"),
        Variant("result fp32", result, "stock", "float32"),
        stop=Stop(1.0),
        levels=(0.9,),
    )
    found = {(one.metric, one.subject): one for one in timed.measurements}
    for name in ("ttft", "tpot", "e2e"):
        for subject in ("original", "result"):
            one = found[f"latency.{name}", subject]
            assert one.value is not None
            assert one.value > 0
            assert 1 <= one.count <= 2 * one.conditions["rounds"]
        for subject in ("result/original", "original/original"):
            ratio = found[f"latency.{name}.ratio", subject]
            assert ratio.interval is not None
            assert ratio.interval.low <= ratio.value <= ratio.interval.high
            assert set(ratio.one_sided) == {0.9, 0.95}
    for metric in ("latency.load", "throughput.prefill", "throughput.decode"):
        assert found[metric, "result"].value > 0
    conditions = found["latency.tpot", "result"].conditions
    expected = {"device": "cpu", "dtype": "float32", "threads": 1, "prompt": 12, "new_tokens": 4, "batch": 1}
    assert expected.items() <= conditions.items()
    assert conditions["engine"].startswith("transformers ")
    assert conditions["rounds"] >= 4
    assert 50 < found["memory.peak", "original"].value < 5000
    assert timed.noise is None
    assert timed.contention["rounds"] >= 10

    rows = json.loads(json.dumps(timed.raw.rows()))
    assert [row["kind"] for row in rows[:5]] == ["conditions", "load", "load", "memory", "memory"]
    assert {row["phase"] for row in rows[5:]} == {"warm-up", "floor", "measure"}
    for row in rows[5:]:
        assert row["seconds"]["tpot"] == pytest.approx((row["seconds"]["e2e"] - row["seconds"]["ttft"]) / 3)
        assert row["cpu_seconds"] >= 0
        assert row["contention"]["wall"] >= row["seconds"]["e2e"]


def test_workloads_are_swept_in_the_same_processes(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    workloads = [Workload("decoder", prompt, 2, batch) for prompt in (4, 8) for batch in (1, 3)]
    timed = measure(
        Variant("original", folder, "stock", "float32"),
        Variant("result", folder, "stock", "float32"),
        workloads=workloads,
        stop=Stop(1.0, 1e-9),
    )
    lengths = [(w.prompt, w.new_tokens, w.batch) for w in workloads]
    ratios = [one for one in timed.measurements if one.metric == "latency.tpot.ratio"]
    assert [one.subject for one in ratios] == ["result/original", "original/original"] * 4
    asked = [tuple(one.conditions[key] for key in ("prompt", "new_tokens", "batch")) for one in ratios[::2]]
    assert asked == lengths
    assert len([one for one in timed.measurements if one.metric == "latency.load"]) == 2
    peaks = [one for one in timed.measurements if one.metric == "memory.peak" and one.subject == "result"]
    assert [one.value for one in peaks] == sorted(one.value for one in peaks)
    assert [bool(one.note) for one in peaks] == [False, True, True, True]
    # Nothing reaches a billionth, and each sentence says which workload it is about.
    assert timed.noise is not None
    assert timed.noise.count("machine too noisy for 1e-07%") == 4
    assert "(prompt 8, new tokens 2, batch 3)" in timed.noise


def test_one_model_alone_has_figures_and_a_floor(tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path)
    timed = measure(
        Variant("original fp32", folder, "stock", "float32"),
        Variant("original bf16", folder, "stock", "bfloat16"),
        original_labels=["original fp32", "original bf16"],
        workloads=[Workload("encoder", 12, None, 1)],
    )
    with_value = [(one.metric, one.subject) for one in timed.measurements if ".p9" not in one.metric]
    assert with_value == [
        ("latency.forward", "original"),
        ("latency.forward", "original"),
        ("latency.forward.ratio", "original/original"),
        ("memory.peak", "original"),
        ("memory.peak", "original"),
        ("latency.load", "original"),
        ("latency.load", "original"),
    ]
    assert timed.measurements[0].conditions["new_tokens"] is None


def test_workers_are_pinned_to_the_same_cpus(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    request = {"op": "load", "folder": str(folder), "loader": "stock", "dtype": "float32", "device": "cpu"}
    with children(["first", "second"], 1) as workers:
        told = [ask(one, request | {"trust_remote_code": False})["cpus"] for one in workers]
        if hasattr(os, "sched_getaffinity"):
            allowed = [os.sched_getaffinity(one.process.pid) for one in workers]
            assert allowed == [{min(os.sched_getaffinity(0))}] * 2
            assert told == [sorted(one) for one in allowed]
        else:
            assert told == [None, None]


def test_a_dead_child_is_an_error_with_its_last_words_and_no_hang(tmp_path: Path) -> None:
    with children(["first", "second"], 1) as (first, second):
        load_request = {"op": "load", "folder": str(tmp_path / "none"), "loader": "stock", "dtype": "float32"}
        load_request |= {"device": "cpu", "trust_remote_code": False}
        with pytest.raises(MissingResourceError, match=r"first: .*does not exist") as missing:
            ask(first, load_request)
        assert missing.value.hint is not None
        with pytest.raises(CompressError, match=r"(?s)first: .*ended with code 1\n.*KeyError: 'nonsense'"):
            ask(first, {"op": "nonsense"})
        os.kill(second.process.pid, signal.SIGKILL)
        with pytest.raises(MissingResourceError, match=r"second: .*killed by signal 9") as killed:
            ask(second, {"op": "sample"})
        assert killed.value.hint is not None


def test_children_end_with_their_parent_whatever_happens() -> None:
    started = []

    def interrupted() -> None:
        with children(["one"], 1) as workers:
            started.extend(workers)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert started[0].process.poll() == -signal.SIGKILL
    # A parent that is killed itself leaves a closed pipe behind.
    alone = subprocess.run(
        [sys.executable, "-m", "compress.measure.latency.worker", "--threads", "1", "--parent", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert alone.returncode == 0


def test_lengths_beyond_the_models_positions_are_refused_before_anything_is_timed(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    with pytest.raises(UsageError, match="129 positions: long holds 128"):
        measure(Variant("long", folder, "stock", "float32"), workloads=[DECODER, Workload("decoder", 120, 10, 1)])


def test_the_worker_refuses_an_output_that_overflows_its_dtype(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    model = load(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e6)
    model.save_pretrained(folder)
    common = {"op": "load", "folder": str(folder), "loader": "stock", "device": "cpu", "trust_remote_code": False}
    prepare = {"op": "prepare", "kind": "decoder", "ids": [[1, 2, 3]], "new_tokens": 2}
    requests = [common | {"dtype": "float16"}, prepare, common | {"dtype": "float32"}, prepare, {"op": "sample"}]
    replies = io.StringIO()
    with torch.inference_mode():
        worker.serve(io.StringIO("".join(json.dumps(one) + "\n" for one in requests)), replies)
    loaded, broken, _, fine, sample = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert (loaded["vocabulary"], loaded["positions"], loaded["special"]) == (256, 128, [])
    assert broken["error"] == BrokenResultError.__name__
    assert "float16" in broken["message"]
    assert fine == {}
    assert set(sample["seconds"]) == {"ttft", "e2e", "tpot"}


def test_all_faults_of_the_settings_are_listed() -> None:
    one = Variant("a", Path(), "fast", "int3")  # type: ignore[arg-type] # the fault under test
    workloads = [Workload("decoder", 0, None, 1), Workload("encoder", 1, 2, -1), Workload("mixer", 1, 1, 1)]  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        measure(one, one, original_labels=["b"], workloads=workloads, stop=Stop(float("nan"), 2.0), threads=0)
    parts = (
        *("'b'", "share a label", "prompt is 0", "loader 'fast'", "dtype 'int3'", "new_tokens is 0", "batch is -1"),
        *("encoder generates no", "kind is 'mixer'", "budget is nan", "precision is 2.0", "threads is 0"),
    )
    for part in parts:
        assert part in caught.value.message
    with pytest.raises(UsageError, match="there is no workload"):
        measure(Variant("a", Path(), "stock", "float32"), workloads=[])
