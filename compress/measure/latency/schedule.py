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
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from compress.measure.latency.contention import Seconds, contended, held_up_seconds
from compress.progress import Progress

CPU = "cpu"
"""Stands for a sample's CPU seconds where the name of a time is asked for."""


@dataclass(frozen=True)
class Sample:
    """One variant, timed once.

    Attributes:
        seconds: by name: ttft, tpot and e2e of a decoder, forward of an encoder.
        cpu_seconds: of all threads of the process.
        contention: what else wanted the CPUs meanwhile, see `contention.observe`.
    """

    seconds: Mapping[str, float]
    cpu_seconds: float | None = None
    contention: Seconds = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        return self.cpu_seconds if name == CPU else self.seconds.get(name)

    @property
    def whole(self) -> float:
        """Seconds from the start to the last token, or of the forward pass."""
        return self.seconds["e2e"] if "e2e" in self.seconds else self.seconds["forward"]


Round = tuple[tuple[int, Sample], ...]
"""(variant, sample) in the order they were measured; every variant is in it twice."""
Clock = Callable[[], float]
Enough = Callable[[Sequence[Round]], bool]
"""Asked after every round whether to stop before the time is over."""

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
    """Everything that was timed. `floor` holds variants 0 and 1, which are both the variant `floor_of`.

    Attributes:
        round_seconds: how long one of `rounds` took, whatever was in it.
    """

    warm_ups: tuple[WarmUp, ...]
    floor_of: int
    floor: tuple[Round, ...]
    rounds: tuple[Round, ...]
    round_seconds: float


def never(_rounds: Sequence[Round]) -> bool:
    """An Enough for those who want the whole budget used."""
    return False


def run_protocol(
    variants: int,
    sample: Callable[[int], Sample],
    *,
    floor_of: int,
    budget: float,
    seed: int | Sequence[int],
    clock: Clock,
    progress: Progress,
    floor_enough: Enough = never,
    enough: Enough = never,
) -> Run:
    """Warms up and times all variants.

    Args:
        sample: times variant i once.
        floor_of: the variant that is measured against itself.
        budget: seconds for the floor and the rounds together; warm-up takes at most as long again. At least
            ROUNDS_LEAST rounds are made of each, however long they take.
    """
    warm_ups = []
    with progress.phase("latency: warm-up", variants) as advance:
        for variant in range(variants):
            warm_ups.append(_warm_up_of(variant, sample, seconds=budget / variants, clock=clock))
            advance(1)
    orders = np.random.default_rng(seed)

    def rounds(name: str, count: int, one: Callable[[int], Sample], seconds: float, done: Enough) -> tuple[Round, ...]:
        with progress.phase(f"latency: {name}", seconds) as advance:
            return interleave(count, one, seconds=seconds, rng=orders, clock=clock, advance=advance, enough=done)

    start = clock()
    floor = rounds("noise floor", 2, lambda _: sample(floor_of), FLOOR_SHARE * budget, floor_enough)
    middle = clock()
    # What the floor left of its share is not lost.
    left = max(budget - (middle - start), (1 - FLOOR_SHARE) * budget)
    measured = rounds("rounds", variants, sample, left, enough)
    return Run(tuple(warm_ups), floor_of, floor, measured, (clock() - middle) / len(measured))


def _warm_up_of(variant: int, sample: Callable[[int], Sample], *, seconds: float, clock: Clock) -> WarmUp:
    return warm_up(lambda: sample(variant), seconds=seconds, clock=clock)


def warm_up(sample: Callable[[], Sample], *, seconds: float, clock: Clock) -> WarmUp:
    """Samples until the median of the last WARM_WINDOW whole times is within WARM_TOLERANCE of the one before.

    Gives up (stable=False) after WARM_MOST samples, or after `seconds` once there are WARM_LEAST.
    """
    start = clock()
    seen: list[Sample] = []
    while len(seen) < WARM_MOST and (len(seen) < WARM_LEAST or clock() - start < seconds):
        seen.append(sample())
        if is_stable([one.whole for one in seen]):
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
    enough: Enough = never,
    at_least: int = ROUNDS_LEAST,
) -> tuple[Round, ...]:
    """Whole rounds until `seconds` have passed or there are `enough`, and never fewer than `at_least`."""
    start = last = clock()
    rounds: list[Round] = []
    while len(rounds) < at_least or (last - start < seconds and not enough(rounds)):
        order = [int(variant) for variant in rng.permutation(variants)]
        rounds.append(tuple((variant, sample(variant)) for variant in [*order, *reversed(order)]))
        now = clock()
        advance(now - last)
        last = now
    return tuple(rounds)


def left_out(rounds: Sequence[Round]) -> frozenset[int]:
    """Rounds, by index, in which others held the CPUs far longer than in the rest; see `contention.contended`."""
    walls = [sum(sample.contention.get("wall") or 0.0 for _, sample in one) for one in rounds]
    held_up = [held_up_seconds([sample.contention for _, sample in one]) for one in rounds]
    return contended(held_up, statistics.median(walls)) if rounds else frozenset()


def quiet(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """The rounds that figures are made of: all but those left out."""
    out = left_out(rounds)
    return tuple(one for index, one in enumerate(rounds) if index not in out)


def values_of(rounds: Sequence[Round], variant: int, name: str) -> npt.NDArray[np.float64]:
    """All values of one variant in the order measured, seconds, [2 x rounds]."""
    return np.array([sample.value(name) for one in rounds for index, sample in one if index == variant], np.float64)


def log_ratios(rounds: Sequence[Round], numerator: int, denominator: int, name: str) -> npt.NDArray[np.float64]:
    """ln of the ratio of the two variants' mean times, one per round, [rounds]."""

    def means(variant: int) -> npt.NDArray[np.float64]:
        pairs: npt.NDArray[np.float64] = values_of(rounds, variant, name).reshape(len(rounds), 2).mean(axis=1)
        return pairs

    ratios: npt.NDArray[np.float64] = np.log(means(numerator) / means(denominator))
    return ratios
