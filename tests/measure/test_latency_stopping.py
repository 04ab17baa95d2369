"""When a run stops before its budget, and what it says when it could not know enough."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulated import Machine, measurements, one, run, steady, timing_of

from compress.measure.latency.schedule import Round, Run, Sample
from compress.measure.latency.stopping import Known, enough_at, is_look, least_known, noise_of, rounds_needed

BOTH = [(1, 0)]


def noise(done: Run, precision: float, comparisons: list[tuple[int, int]] = BOTH) -> str | None:
    return noise_of(precision, done.rounds, done.floor, comparisons, ["forward"], round_seconds=done.round_seconds)


def pairs(ratios: list[float]) -> list[Round]:
    """Rounds in which variant 1 takes so many times the second that variant 0 takes."""
    one_second = Sample({"forward": 1.0})
    return [
        ((0, one_second), (1, Sample({"forward": ratio})), (1, Sample({"forward": ratio})), (0, one_second))
        for ratio in ratios
    ]


def test_looks_grow_by_half() -> None:
    assert [n for n in range(1, 100) if is_look(n)] == [12, 18, 27, 41, 61, 92]


def test_a_quiet_machine_stops_at_a_look_and_a_loud_one_uses_its_budget() -> None:
    quiet_run = run(Machine(steady(0.02), steady(0.02), noise=0.01), budget=60.0, precision=0.02)
    assert is_look(len(quiet_run.rounds))
    assert len(quiet_run.rounds) < 30
    assert noise(quiet_run, 0.02) is None
    loud = Machine(steady(0.02), steady(0.02), noise=0.5)
    loud_run = run(loud, budget=10.0, precision=0.02)
    assert loud.now > 10.0
    assert noise(loud_run, 0.02) is not None


def test_stopping_asks_about_the_width_alone() -> None:
    """The same scatter around another ratio stops at the same look."""
    rng = np.random.default_rng(0)
    scatter = np.exp(rng.normal(0, 0.04, 61))
    enough = enough_at(0.02, BOTH, ["forward"])
    stops = []
    for factor in (0.5, 1.0, 1.02, 3.0):
        rounds = pairs([float(factor * value) for value in scatter])
        stops.append([n for n in range(1, 62) if enough(rounds[:n])])
    assert stops[0]
    assert stops == stops[:1] * 4


def test_what_stopped_holds_what_was_asked() -> None:
    for seed in range(10):
        done = run(Machine(steady(0.02), steady(0.03), noise=0.04, seed=seed), budget=90.0, precision=0.03, seed=seed)
        ratio = one(measurements(done), "latency.forward.ratio", "result/original")
        assert ratio.interval is not None
        assert math.log(ratio.interval.high / ratio.interval.low) / 2 <= math.log(1.03)


def test_early_stopping_raises_no_false_alarms() -> None:
    alarms = 0
    for seed in range(200):
        machine = Machine(steady(0.02), steady(0.02), noise=0.05, seed=seed)
        done = run(machine, budget=60.0, precision=0.02, seed=seed)
        interval = one(measurements(done), "latency.forward.ratio", "result/original").interval
        assert interval is not None
        alarms += not interval.low <= 1 <= interval.high
    assert alarms <= 18  # 5 % are expected, and 18 or fewer in 99 of 100 series


def test_the_sentence_names_what_is_known_and_what_it_would_take() -> None:
    machine = Machine(steady(0.5), steady(0.5), noise=0.2)
    done = run(machine, budget=60.0, precision=0.02)
    known = least_known(done.rounds, BOTH, ["forward"])
    needed = rounds_needed(known, 0.02)
    assert needed is not None
    minutes = needed * done.round_seconds / 60
    assert noise(done, 0.02) == (
        f"machine too noisy for 2%: the ratio of forward is known to {100 * math.expm1(known.half_width):.2g}% after "
        f"{len(done.rounds)} blocks; about {needed} blocks ({minutes:.2g} min) would be needed"
    )


def test_the_blocks_needed_are_those_of_the_formula() -> None:
    """k = (1.96 s / ln(1 + precision))^2 with s = h sqrt(n) / 1.96; they suffice on a machine like this one."""
    known = Known("the ratio of tpot", 1.96 * 0.1 / math.sqrt(40), 40)
    assert rounds_needed(known, 0.02) == math.ceil((1.96 * 0.1 / math.log(1.02)) ** 2)
    assert rounds_needed(Known("", math.inf, 1), 0.02) is None
    rng = np.random.default_rng(0)
    ratios = [float(np.exp(rng.normal(0, 0.1))) for _ in range(400)]
    needed = rounds_needed(least_known(pairs(ratios[:60]), BOTH, ["forward"]), 0.02)
    assert needed is not None
    assert least_known(pairs(ratios[: int(1.3 * needed)]), BOTH, ["forward"]).half_width < math.log(1.02)


def test_the_worst_of_all_ratios_counts() -> None:
    rng = np.random.default_rng(0)
    rounds: list[Round] = []
    for _ in range(30):
        near, far = (float(np.exp(rng.normal(0, s))) for s in (0.01, 0.2))
        sides = [Sample({"ttft": 1.0, "tpot": 1.0}), Sample({"ttft": near, "tpot": far})]
        rounds.append(tuple((variant, sides[variant]) for variant in (0, 1, 1, 0)))
    worst = least_known(rounds, BOTH, ["ttft", "tpot"])
    assert worst.what == "the ratio of tpot"
    assert worst.half_width > 0.05 > least_known(rounds, BOTH, ["ttft"]).half_width


def test_one_model_alone_is_known_by_its_median() -> None:
    alone = run(Machine(steady(0.02), noise=0.01), budget=4.0)
    assert least_known(alone.rounds, [], ["forward"]).what == "the median of forward"
    assert noise(alone, 0.02, []) is None
    assert "the median of forward is known to" in (noise(run(Machine(steady(0.02), noise=0.6)), 0.02, []) or "")


def test_an_original_that_differs_from_itself_is_noise() -> None:
    done = run(Machine(steady(0.02), steady(0.02), noise=0.005), budget=20.0)
    shifted = Run(done.warm_ups, 0, tuple(pairs([1.05, 1.051, 1.049] * 10)), done.rounds, done.round_seconds)
    assert noise(done, 0.02) is None
    assert "the original against itself shows a ratio of forward of 1.05 (1.049 to 1.05)" in (
        noise(shifted, 0.02) or ""
    )
    assert noise(shifted, 0.08) is None


def test_rounds_left_out_are_not_known() -> None:
    machine = Machine(steady(0.02), steady(0.02), held_up=lambda now: 0.1 if now % 10 < 1 else 0.0)
    done = run(machine, budget=30.0)
    timing = timing_of(done)
    assert least_known(done.rounds, BOTH, ["forward"]).rounds == len(timing.rounds) < len(done.rounds)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_rounds_are_not_enough(count: int) -> None:
    assert not enough_at(0.5, BOTH, ["forward"])(pairs([1.0] * count))
