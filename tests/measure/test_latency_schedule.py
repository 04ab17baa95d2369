"""The timing protocol on a simulated machine: what is timed when, and what drift and cold starts do to it."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import ORIGINAL, RESULT, Machine, measurements, one, run, steady

from compress.measure.latency.schedule import Sample, interleave, is_stable, log_ratios, values_of, warm_up


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
    naive = [[block.sample(variant).whole for _ in range(100)] for variant in (ORIGINAL, RESULT)]
    assert np.median(naive[RESULT]) / np.median(naive[ORIGINAL]) > 1.3

    ratio = one(measurements(run(Machine(slowing, slowing))), "latency.forward.ratio", "result/original")
    assert ratio.interval is not None
    assert ratio.interval.low < 1.0 < ratio.interval.high
    assert ratio.value == pytest.approx(1.0, abs=0.01)


def test_the_floor_seldom_claims_a_difference() -> None:
    false_alarms = 0
    for seed in range(60):
        found = measurements(run(Machine(steady(0.02), steady(0.02), noise=0.05, seed=seed), budget=1.5, seed=seed))
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


def test_the_budget_is_kept_and_warm_up_is_not_in_it() -> None:
    machine = Machine(steady(0.05), steady(0.05), noise=0.0)
    done = run(machine, budget=10.0)
    warm = sum(sample.whole for one_ in done.warm_ups for sample in one_.samples)
    assert machine.now - warm == pytest.approx(10.0, abs=0.4)
    assert done.round_seconds == pytest.approx(0.2)


def test_five_rounds_are_made_however_slow() -> None:
    done = run(Machine(steady(9.0), steady(9.0)), budget=1.0)
    assert (len(done.floor), len(done.rounds)) == (5, 5)
    assert [len(warm.samples) for warm in done.warm_ups] == [3, 3]
    found = measurements(done)
    assert "not yet stable after 3" in (one(found, "latency.forward", "result").note or "")


def test_warm_up_waits_for_two_equal_medians_and_gives_up() -> None:
    falling = iter([8.0, 4.0, 2.0, 1.5, 1.2, 1.1, 1.0, 1.0, 1.0, 1.0, 1.0])
    done = warm_up(lambda: Sample({"e2e": next(falling), "ttft": 0.1}), seconds=1e9, clock=lambda: 0.0)
    assert done.stable
    assert [sample.whole for sample in done.samples] == [8.0, 4.0, 2.0, 1.5, 1.2, 1.1, 1.0, 1.0, 1.0, 1.0]

    endless = iter(1.5**-i for i in range(99))
    capped = warm_up(lambda: Sample({"forward": next(endless)}), seconds=1e9, clock=lambda: 0.0)
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
        (
            (0, Sample({"forward": speed})),
            (1, Sample({"forward": 2 * speed})),
            (1, Sample({"forward": 2 * speed})),
            (0, Sample({"forward": speed})),
        )
        for speed in (1.0, 50.0)
    )
    np.testing.assert_allclose(np.exp(log_ratios(rounds, 1, 0, "forward")), [2.0, 2.0])
    assert values_of(rounds, 1, "forward").tolist() == [2.0, 2.0, 100.0, 100.0]


def test_interleave_reports_the_time_it_used() -> None:
    machine, used = Machine(steady(0.1), noise=0.0), []
    interleave(1, machine.sample, seconds=2.0, rng=np.random.default_rng(0), clock=machine.clock, advance=used.append)
    assert sum(used) == pytest.approx(machine.now)


def test_rounds_end_when_there_are_enough_but_not_before_the_least() -> None:
    machine = Machine(steady(0.1), noise=0.0)
    asked: list[int] = []

    def enough(rounds: list[object]) -> bool:
        asked.append(len(rounds))
        return len(rounds) >= 7

    rounds = interleave(
        1,
        machine.sample,
        seconds=100.0,
        rng=np.random.default_rng(0),
        clock=machine.clock,
        advance=lambda _: None,
        enough=enough,
    )
    assert len(rounds) == 7
    assert asked == [5, 6, 7]
