"""What others took from a sample, read from system files, and the rule that leaves rounds out for it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import Machine, run, steady

from compress.measure.latency.contention import (
    MOST_LEFT_OUT,
    contended,
    cpu_quota,
    held_up_seconds,
    machine_state,
    observe,
)
from compress.measure.latency.pinning import pin
from compress.measure.latency.schedule import Round, Sample, left_out, quiet

TICK = 1 / os.sysconf("SC_CLK_TCK")


def write_proc(proc: Path, *, pressure: int, steal: tuple[int, int], waiting: tuple[int, int]) -> None:
    """`pressure` in microseconds, `steal` of two CPUs in ticks, `waiting` of two threads in nanoseconds."""
    for folder in ("pressure", "self/task/11", "self/task/12"):
        (proc / folder).mkdir(parents=True, exist_ok=True)
    (proc / "pressure/cpu").write_text(f"some avg10=1.00 avg60=1.00 avg300=1.00 total={pressure}\nfull total=9\n")
    rows = [f"cpu{index} 100 0 50 900 3 0 1 {ticks} 0 0" for index, ticks in enumerate(steal)]
    (proc / "stat").write_text("\n".join([f"cpu  200 0 100 1800 6 0 2 {sum(steal)} 0 0", *rows, "intr 5"]))
    for thread, nanoseconds in zip((11, 12), waiting, strict=True):
        (proc / f"self/task/{thread}/schedstat").write_text(f"5000 {nanoseconds} 7\n")


@pytest.mark.parametrize(("cpus", "ticks"), [(None, 5), ([1], 2), ([0, 1], 5)])
def test_a_sample_is_told_what_others_took(tmp_path: Path, cpus: list[int] | None, ticks: int) -> None:
    write_proc(tmp_path, pressure=1_000_000, steal=(10, 20), waiting=(10**9, 0))

    def work() -> str:
        write_proc(tmp_path, pressure=1_250_000, steal=(13, 22), waiting=(3 * 10**9, 5 * 10**8))
        return "done"

    answer, cpu_seconds, told = observe(work, cpus, proc=tmp_path)
    assert answer == "done"
    assert cpu_seconds >= 0
    assert told.pop("wall") > 0
    assert told == {
        "pressure": pytest.approx(0.25),
        "steal": pytest.approx(ticks * TICK),
        "waiting": pytest.approx(2.5),
    }


def test_threads_that_end_meanwhile_leave_no_negative_time(tmp_path: Path) -> None:
    write_proc(tmp_path, pressure=1, steal=(1, 1), waiting=(10**9, 10**9))
    _, _, told = observe(lambda: (tmp_path / "self/task/12/schedstat").unlink(), None, proc=tmp_path)
    assert told["waiting"] == 0.0


def test_a_system_without_these_files_tells_nothing(tmp_path: Path) -> None:
    _, _, told = observe(lambda: None, [0], proc=tmp_path)
    assert (told["pressure"], told["steal"], told["waiting"]) == (None, None, None)
    assert held_up_seconds([told] * 4) is None
    state = machine_state(None, proc=tmp_path, sys=tmp_path)
    assert (state["governor"], state["frequency_mhz"], state["cpu_quota"]) == (None, None, None)


def test_the_clock_of_the_cpu_is_read(tmp_path: Path) -> None:
    clock = tmp_path / "devices/system/cpu/cpu3/cpufreq"
    clock.mkdir(parents=True)
    (clock / "scaling_governor").write_text("powersave\n")
    (clock / "scaling_cur_freq").write_text("2400000\n")
    state = machine_state([3, 4], proc=tmp_path, sys=tmp_path)
    assert (state["governor"], state["frequency_mhz"]) == ("powersave", 2400.0)


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/a/b", {"a/b/cpu.max": "150000 100000", "a/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"}, 2.0),
        ("4:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/x", {"cpu/x/cpu.cfs_quota_us": "5", "cpu/x/cpu.cfs_period_us": "1"}, None),
    ],
)
def test_the_quota_of_the_control_group(tmp_path: Path, line: str, files: dict[str, str], quota: float | None) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"{line}\n")
    for name, text in files.items():
        file = tmp_path / "fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert cpu_quota(proc=tmp_path, sys=tmp_path) == quota


def test_waiting_counts_before_pressure_and_steal_comes_on_top() -> None:
    own = {"wall": 1.0, "pressure": 0.9, "steal": 0.1, "waiting": 0.2}
    assert held_up_seconds([own]) == pytest.approx(0.3)
    assert held_up_seconds([own | {"waiting": None}]) == pytest.approx(1.0)
    assert held_up_seconds([own | {"waiting": None, "pressure": None}]) == pytest.approx(0.1)
    assert held_up_seconds([own, own | {"steal": None}]) == pytest.approx(0.5)


def test_only_rounds_far_above_the_usual_are_left_out() -> None:
    assert contended([0.0, 0.0, 0.0, 0.0, 0.5], 1.0) == {4}
    assert contended([0.4, 0.4, 0.4, 0.4, 0.5], 1.0) == frozenset()  # as busy as always
    assert contended([0.0, 0.0, 0.0, 0.0, 0.04], 1.0) == frozenset()  # a trifle
    assert contended([0.0, 0.0, None, 0.0, 0.5], 1.0) == frozenset()
    assert contended([], 1.0) == frozenset()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60))
def test_no_more_than_a_fifth_is_left_out_and_the_worst_first(held_up: list[float]) -> None:
    out = contended(held_up, 1.0)
    assert len(out) <= MOST_LEFT_OUT * len(held_up)
    above = {index for index, seconds in enumerate(held_up) if out and seconds > max(held_up[i] for i in out)}
    assert above <= out


def with_times(rounds: tuple[Round, ...], rng: np.random.Generator) -> tuple[Round, ...]:
    """The same rounds, held up as before, with other times of the models."""
    return tuple(
        tuple(
            (variant, Sample({"forward": float(rng.lognormal(0, 2))}, float(rng.lognormal()), sample.contention))
            for variant, sample in one
        )
        for one in rounds
    )


def test_the_rule_does_not_see_the_result() -> None:
    """With any other times of the models, and with the models exchanged, the same rounds are left out."""
    noise = np.random.default_rng(3)
    machine = Machine(steady(0.02), steady(0.02), held_up=lambda _now: float(noise.choice([0, 0.1], p=[0.9, 0.1]) / 4))
    rounds = run(machine, budget=8.0).rounds
    out = left_out(rounds)
    assert len(out) > 2
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert left_out(with_times(rounds, rng)) == out
    exchanged = tuple(tuple((1 - variant, sample) for variant, sample in one) for one in rounds)
    assert left_out(exchanged) == out


def test_a_slow_round_that_nobody_held_up_stays() -> None:
    spikes = np.random.default_rng(0)
    machine = Machine(*[lambda _calls, _now: 0.5 if spikes.random() < 0.05 else 0.02] * 2)
    rounds = run(machine, budget=20.0).rounds
    assert max(sample.whole for one in rounds for _, sample in one) > 0.4
    assert quiet(rounds) == rounds


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot pin")
def test_pinning_takes_the_first_cpus_for_every_thread() -> None:
    before = os.sched_getaffinity(0)
    try:
        assert pin(1) == [min(before)]
        for task in Path("/proc/self/task").iterdir():
            assert os.sched_getaffinity(int(task.name)) == {min(before)}
    finally:
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), before)
    assert os.sched_getaffinity(0) == before
