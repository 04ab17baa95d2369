"""The timing protocol on a simulated machine: time passes only where a model works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compress.measure.latency_figures import Timing, Variant, latency_measurements, raw_samples
from compress.measure.schedule import (
    Run,
    Sample,
    interleave,
    is_stable,
    log_ratios,
    run_protocol,
    values_of,
    warm_up,
)
from compress.progress import Silent
from compress.records import Measurement

ORIGINAL, RESULT = 0, 1


class Machine:
    """A clock and variants whose forward pass takes `cost(calls so far, now)` seconds, with 1 % noise."""

    def __init__(self, *costs: Callable[[int, float], float], noise: float = 0.01, seed: int = 0) -> None:
        self.costs, self.noise = costs, noise
        self.now = 0.0
        self.calls = [0] * len(costs)
        self.order: list[int] = []
        self.rng = np.random.default_rng(seed)

    def clock(self) -> float:
        return self.now

    def sample(self, variant: int) -> Sample:
        seconds = self.costs[variant](self.calls[variant], self.now) * np.exp(self.rng.normal(0, self.noise))
        self.calls[variant] += 1
        self.order.append(variant)
        self.now += seconds
        return {"forward": float(seconds)}


def steady(seconds: float) -> Callable[[int, float], float]:
    return lambda _calls, _now: seconds


def run(machine: Machine, *, seconds: float = 4.0, seed: int = 0, floor_of: int = ORIGINAL) -> Run:
    return run_protocol(
        len(machine.costs),
        machine.sample,
        floor_of=floor_of,
        seconds=seconds,
        seed=seed,
        clock=machine.clock,
        progress=Silent(),
    )


def measurements(
    done: Run, variants: tuple[tuple[str, str], ...] = (("original", "float32"), ("result", "float32"))
) -> list[Measurement]:
    timing = Timing(
        run=done,
        variants=[Variant(label, Path(label), "stock", dtype) for label, dtype in variants],
        original_labels=[label for label, _ in variants if label.startswith("original")],
        kind="encoder",
        engines=["simulated"] * len(variants),
        peaks=[2_500_000] * len(variants),
        conditions={"rounds": len(done.rounds)},
        seed=0,
    )
    return latency_measurements(timing)


def one(found: list[Measurement], metric: str, subject: str) -> Measurement:
    (match,) = [m for m in found if m.metric == metric and m.subject == subject]
    return match


def test_two_slow_first_calls_leave_the_median_alone() -> None:
    cold = Machine(steady(0.02), lambda calls, _: 0.3 if calls < 2 else 0.02)
    found = measurements(run(cold))
    assert one(found, "latency.forward", "result").value == pytest.approx(20.0, rel=0.01)
    ratio = one(found, "latency.forward.ratio", "result/original")
    assert ratio.interval is not None
    assert ratio.interval.low < 1.0 < ratio.interval.high
    assert ratio.value == pytest.approx(1.0, abs=0.005)


def test_a_constant_delay_shows_in_full() -> None:
    found = measurements(run(Machine(steady(0.02), steady(0.025))))
    original, result = (one(found, "latency.forward", subject) for subject in ("original", "result"))
    assert result.value - original.value == pytest.approx(5.0, abs=0.3)
    ratio = one(found, "latency.forward.ratio", "result/original")
    assert ratio.interval is not None
    assert ratio.interval.low < 1.25 < ratio.interval.high
    assert ratio.interval.high - ratio.interval.low < 0.02


def test_swapping_the_models_changes_the_ratio_less_than_its_interval() -> None:
    straight = measurements(run(Machine(steady(0.02), steady(0.03), noise=0.05)))
    swapped = measurements(
        run(Machine(steady(0.03), steady(0.02), noise=0.05, seed=1), floor_of=1, seed=1),
        (("result", "float32"), ("original", "float32")),
    )
    first, second = (one(found, "latency.forward.ratio", "result/original") for found in (straight, swapped))
    assert first.interval is not None
    assert abs(first.value - second.value) < first.interval.high - first.interval.low
    assert first.value == pytest.approx(1.5, rel=0.03)


def test_drift_fools_one_after_the_other_and_not_interleaved_rounds() -> None:
    def slowing(_calls: int, now: float) -> float:
        return 0.02 * (1 + 0.2 * now)

    block = Machine(slowing, slowing)
    naive = [[block.sample(variant)["forward"] for _ in range(100)] for variant in (ORIGINAL, RESULT)]
    assert np.median(naive[RESULT]) / np.median(naive[ORIGINAL]) > 1.3

    ratio = one(measurements(run(Machine(slowing, slowing))), "latency.forward.ratio", "result/original")
    assert ratio.interval is not None
    assert ratio.interval.low < 1.0 < ratio.interval.high
    assert ratio.value == pytest.approx(1.0, abs=0.01)


def test_the_floor_seldom_claims_a_difference() -> None:
    false_alarms = 0
    for seed in range(60):
        found = measurements(run(Machine(steady(0.02), steady(0.02), noise=0.05, seed=seed), seconds=1.5, seed=seed))
        floor = one(found, "latency.forward.ratio", "original/original")
        assert floor.interval is not None
        false_alarms += not floor.interval.low <= 1.0 <= floor.interval.high
    assert false_alarms <= 7


def test_rounds_are_palindromes_in_seeded_random_order() -> None:
    machine = Machine(*[steady(0.01)] * 3)
    done = run(machine)
    orders = [[variant for variant, _ in round_] for round_ in done.rounds]
    assert all(order == order[::-1] and sorted(order) == [0, 0, 1, 1, 2, 2] for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    again = run(Machine(*[steady(0.01)] * 3))
    assert [[variant for variant, _ in round_] for round_ in again.rounds] == orders
    assert done.floor_of == 0
    assert all([side for side, _ in round_] in ([0, 1, 1, 0], [1, 0, 0, 1]) for round_ in done.floor)


def test_time_is_kept_and_warm_up_is_not_in_it() -> None:
    machine = Machine(steady(0.05), steady(0.05), noise=0.0)
    done = run(machine, seconds=10.0)
    warm = sum(sample["forward"] for one_ in done.warm_ups for sample in one_.samples)
    assert machine.now - warm == pytest.approx(10.0, abs=0.4)


def test_five_rounds_are_made_however_slow() -> None:
    done = run(Machine(steady(9.0), steady(9.0)), seconds=1.0)
    assert (len(done.floor), len(done.rounds)) == (5, 5)
    assert [len(warm.samples) for warm in done.warm_ups] == [3, 3]
    found = measurements(done)
    assert "not yet stable after 3" in (one(found, "latency.forward", "result").note or "")


def test_warm_up_waits_for_two_equal_medians_and_gives_up() -> None:
    falling = iter([8.0, 4.0, 2.0, 1.5, 1.2, 1.1, 1.0, 1.0, 1.0, 1.0, 1.0])
    done = warm_up(lambda: {"e2e": next(falling), "ttft": 0.1}, seconds=1e9, clock=lambda: 0.0)
    assert done.stable
    assert [sample["e2e"] for sample in done.samples] == [8.0, 4.0, 2.0, 1.5, 1.2, 1.1, 1.0, 1.0, 1.0, 1.0]

    endless = iter(1.5**-i for i in range(99))
    capped = warm_up(lambda: {"forward": next(endless)}, seconds=1e9, clock=lambda: 0.0)
    assert (capped.stable, len(capped.samples)) == (False, 50)


def test_stability_compares_rolling_medians() -> None:
    assert not is_stable([1.0] * 5)
    assert is_stable([300.0, 300.0, 5.0, 5.0, 5.0, 5.0])
    assert not is_stable([300.0, 300.0, 300.0, 5.0, 5.0, 5.0])
    assert is_stable([1.0, 1.0, 1.0, 1.019, 1.019, 1.019])
    assert not is_stable([1.0, 1.0, 1.0, 1.021, 1.021, 1.021])


def test_ratios_stay_inside_their_round() -> None:
    """Two rounds at different speeds of the machine: each ratio is 2, whatever the speed."""
    rounds = tuple(
        ((0, {"forward": speed}), (1, {"forward": 2 * speed}), (1, {"forward": 2 * speed}), (0, {"forward": speed}))
        for speed in (1.0, 50.0)
    )
    np.testing.assert_allclose(np.exp(log_ratios(rounds, 1, 0, "forward")), [2.0, 2.0])
    assert values_of(rounds, 1, "forward").tolist() == [2.0, 2.0, 100.0, 100.0]


def test_results_are_compared_with_the_same_dtype_and_the_fastest_original() -> None:
    machine = Machine(steady(0.040), steady(0.020), steady(0.030), steady(0.010))
    variants = (
        ("original fp32", "float32"),
        ("original bf16", "bfloat16"),
        ("result fp32", "float32"),
        ("result fp16", "float16"),
    )
    found = [m for m in measurements(run(machine), variants) if m.subject == "result/original"]
    table = [(m.conditions["variant"], m.conditions["original"], m.conditions["comparison"]) for m in found]
    assert table == [
        ("result fp32", "original fp32", "same dtype"),
        ("result fp32", "original bf16", "fastest original"),
        ("result fp16", "original bf16", "fastest original"),
    ]
    assert [m.value for m in found] == pytest.approx([0.75, 1.5, 0.5], rel=0.01)


def test_figures_carry_counts_and_percentiles_only_where_justified() -> None:
    many = measurements(run(Machine(steady(0.02), steady(0.02))))
    median = one(many, "latency.forward", "result")
    assert median.count is not None
    assert median.count >= 29
    assert median.interval is not None
    assert "p90" in (median.note or "")
    few = measurements(run(Machine(steady(9.0), steady(9.0)), seconds=0.1))
    assert "p90" not in (one(few, "latency.forward", "result").note or "")
    assert one(few, "memory.peak", "result").value == 2.5


def test_one_new_token_has_no_tpot() -> None:
    machine = Machine(steady(0.01), steady(0.01))

    def decode(variant: int) -> Sample:
        seconds = machine.sample(variant)["forward"]
        return {"ttft": seconds, "e2e": seconds}

    done = run_protocol(2, decode, floor_of=0, seconds=1, seed=0, clock=machine.clock, progress=Silent())
    timing = Timing(
        run=done,
        variants=[Variant("original", Path(), "stock", "float32"), Variant("result", Path(), "stock", "float32")],
        original_labels=["original"],
        kind="decoder",
        engines=["", ""],
        peaks=[None, None],
        conditions={},
        seed=0,
    )
    found = latency_measurements(timing)
    tpot = one(found, "latency.tpot", "result")
    assert tpot.value is None
    assert tpot.note is not None
    assert one(found, "latency.ttft", "result").value is not None
    assert one(found, "memory.peak", "original").value is None


def test_every_sample_is_kept_in_order() -> None:
    machine = Machine(steady(0.02), steady(0.03))
    done = run(machine)
    rows = raw_samples(done, [Variant("a", Path(), "stock", "float32"), Variant("b", Path(), "stock", "float32")])
    assert len(rows) == len(machine.order)
    assert [("a", "b").index(row.variant) for row in rows] == machine.order
    assert sum(row.seconds["forward"] for row in rows) == pytest.approx(machine.now)
    assert next(row.phase for row in rows if row.phase != "warm-up") == "floor"


def test_interleave_reports_the_time_it_used() -> None:
    machine, used = Machine(steady(0.1), noise=0.0), []
    interleave(1, machine.sample, seconds=2.0, rng=np.random.default_rng(0), clock=machine.clock, advance=used.append)
    assert sum(used) == pytest.approx(machine.now)
