"""When which variant is timed: warm-up, the A/A check, then interleaved rounds. No process and no real clock here.

    warm-up    each variant alone, with the measured shapes, until stable; excluded
    floor      A A' A' A rounds in which both are the same model: what this machine shows for no difference
    rounds     all variants in random order and then in the reverse order (A B B A, or A B C C B A)

Within a round a linear drift of the machine hits every variant equally; the random order shares out what follows
from standing first or second. Ratios are taken inside a round only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from compress.progress import Progress

Sample = Mapping[str, float]
"""Seconds by name: ttft, tpot and e2e of a decoder, forward of an encoder."""
Round = tuple[tuple[int, Sample], ...]
"""(variant, sample) in the order they were measured; every variant is in it twice."""
Clock = Callable[[], float]

WARM_WINDOW = 5
WARM_TOLERANCE = 0.02
WARM_MOST = 50
WARM_LEAST = 3
ROUNDS_LEAST = 5
FLOOR_SHARE = 0.2
"""Share of the measuring time that goes to the A/A check."""


@dataclass(frozen=True)
class WarmUp:
    samples: tuple[Sample, ...]
    stable: bool


@dataclass(frozen=True)
class Run:
    """Everything that was timed. `floor` holds variants 0 and 1, which are both the variant `floor_of`."""

    warm_ups: tuple[WarmUp, ...]
    floor_of: int
    floor: tuple[Round, ...]
    rounds: tuple[Round, ...]


def run_protocol(
    variants: int,
    sample: Callable[[int], Sample],
    *,
    floor_of: int,
    seconds: float,
    seed: int,
    clock: Clock,
    progress: Progress,
) -> Run:
    """Warms up and times all variants.

    Args:
        sample: times variant i once.
        floor_of: the variant that is measured against itself.
        seconds: measuring time for the floor and the rounds together; warm-up takes at most as
            long again. At least
            ROUNDS_LEAST rounds are made of each, however long they take.
    """

    def alone(variant: int) -> WarmUp:
        return warm_up(lambda: sample(variant), seconds=seconds / variants, clock=clock)

    warm_ups = []
    with progress.phase("latency: warm-up", variants) as advance:
        for variant in range(variants):
            warm_ups.append(alone(variant))
            advance(1)
    orders = np.random.default_rng(seed)

    def rounds(name: str, count: int, one: Callable[[int], Sample], share: float) -> tuple[Round, ...]:
        with progress.phase(f"latency: {name}", share * seconds) as advance:
            return interleave(count, one, seconds=share * seconds, rng=orders, clock=clock, advance=advance)

    floor = rounds("noise floor", 2, lambda _: sample(floor_of), FLOOR_SHARE)
    return Run(tuple(warm_ups), floor_of, floor, rounds("rounds", variants, sample, 1 - FLOOR_SHARE))


def warm_up(sample: Callable[[], Sample], *, seconds: float, clock: Clock) -> WarmUp:
    """Samples until the median of the last WARM_WINDOW whole times is within WARM_TOLERANCE of the one before.

    Gives up (stable=False) after WARM_MOST samples, or after `seconds` once there are WARM_LEAST.
    """
    start = clock()
    seen: list[Sample] = []
    while len(seen) < WARM_MOST and (len(seen) < WARM_LEAST or clock() - start < seconds):
        seen.append(sample())
        if is_stable([whole_time(one) for one in seen]):
            return WarmUp(tuple(seen), stable=True)
    return WarmUp(tuple(seen), stable=False)


def is_stable(times: Sequence[float]) -> bool:
    """Whether the rolling median of WARM_WINDOW moved by at most WARM_TOLERANCE with the last value."""
    if len(times) <= WARM_WINDOW:
        return False
    before = statistics.median(times[-WARM_WINDOW - 1 : -1])
    return abs(statistics.median(times[-WARM_WINDOW:]) - before) <= WARM_TOLERANCE * before


def interleave(
    variants: int,
    sample: Callable[[int], Sample],
    *,
    seconds: float,
    rng: np.random.Generator,
    clock: Clock,
    advance: Callable[[float], None],
    at_least: int = ROUNDS_LEAST,
) -> tuple[Round, ...]:
    """Whole rounds until `seconds` have passed, and never fewer than `at_least`."""
    start = last = clock()
    rounds: list[Round] = []
    while len(rounds) < at_least or last - start < seconds:
        order = [int(variant) for variant in rng.permutation(variants)]
        rounds.append(tuple((variant, sample(variant)) for variant in [*order, *reversed(order)]))
        now = clock()
        advance(now - last)
        last = now
    return tuple(rounds)


def whole_time(sample: Sample) -> float:
    """Seconds from the start to the last token, or of the forward pass."""
    return sample["e2e"] if "e2e" in sample else sample["forward"]


def values_of(rounds: Sequence[Round], variant: int, name: str) -> npt.NDArray[np.float64]:
    """All values of one variant in the order measured, seconds, [2 x rounds]."""
    return np.array([sample[name] for one in rounds for index, sample in one if index == variant])


def log_ratios(rounds: Sequence[Round], numerator: int, denominator: int, name: str) -> npt.NDArray[np.float64]:
    """ln of the ratio of the two variants' mean times, one per round, [rounds]."""

    def means(variant: int) -> npt.NDArray[np.float64]:
        pairs: npt.NDArray[np.float64] = values_of(rounds, variant, name).reshape(len(rounds), 2).mean(axis=1)
        return pairs

    ratios: npt.NDArray[np.float64] = np.log(means(numerator) / means(denominator))
    return ratios
