"""A machine on which time passes only where a model works: a clock, and samples taken on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from compress.measure.latency.figures import Timing, latency_measurements
from compress.measure.latency.raw import Loaded
from compress.measure.latency.schedule import Run, Sample, run_protocol
from compress.measure.latency.settings import Variant, Workload
from compress.measure.latency.stopping import enough_at
from compress.progress import Silent
from compress.records import Measurement

ORIGINAL, RESULT = 0, 1
ENCODER = Workload("encoder", 128, None, 1)
Cost = Callable[[int, float], float]
"""Seconds of one forward pass, from the number of calls so far and the time of day."""


def steady(seconds: float) -> Cost:
    return lambda _calls, _now: seconds


class Machine:
    """Variants whose forward passes cost what `costs` say, with log-normal noise of 1 %.

    Args:
        held_up: seconds for which others hold the CPU during a sample, from the time of day: they make it longer
            and are told as `waiting`.
    """

    def __init__(
        self, *costs: Cost, noise: float = 0.01, seed: int = 0, held_up: Callable[[float], float] = lambda _now: 0.0
    ) -> None:
        self.costs, self.noise, self.held_up = costs, noise, held_up
        self.now = 0.0
        self.calls = [0] * len(costs)
        self.order: list[int] = []
        self.rng = np.random.default_rng(seed)

    def clock(self) -> float:
        return self.now

    def sample(self, variant: int) -> Sample:
        work = float(self.costs[variant](self.calls[variant], self.now) * np.exp(self.rng.normal(0, self.noise)))
        waiting = self.held_up(self.now)
        self.calls[variant] += 1
        self.order.append(variant)
        self.now += work + waiting
        contention = {"wall": work + waiting, "pressure": None, "steal": None, "waiting": waiting}
        return Sample({"forward": work + waiting}, work, contention)


def run(
    machine: Machine, *, budget: float = 4.0, seed: int = 0, floor_of: int = ORIGINAL, precision: float | None = None
) -> Run:
    stops = {}
    if precision is not None:
        comparisons = [(variant, ORIGINAL) for variant in range(1, len(machine.costs))]
        stops = {"enough": enough_at(precision, comparisons, ["forward"])}
    return run_protocol(
        len(machine.costs),
        machine.sample,
        floor_of=floor_of,
        budget=budget,
        seed=seed,
        clock=machine.clock,
        progress=Silent(),
        **stops,
    )


def timing_of(
    done: Run,
    variants: Sequence[tuple[str, str]] = (("original", "float32"), ("result", "float32")),
    workload: Workload = ENCODER,
    peak: int | None = 2_500_000,
) -> Timing:
    """Variants are (label, dtype); those whose label starts with "original" are the original."""
    return Timing(
        run=done,
        variants=[Variant(label, Path(label), "stock", dtype) for label, dtype in variants],
        original_labels=[label for label, _ in variants if label.startswith("original")],
        workload=workload,
        loads=[Loaded("simulated", 0.5, peak)] * len(variants),
        peaks=[peak] * len(variants),
        conditions={"device": "simulated"},
    )


def measurements(
    done: Run, variants: Sequence[tuple[str, str]] = (("original", "float32"), ("result", "float32"))
) -> list[Measurement]:
    return latency_measurements(timing_of(done, variants))


def one(found: Sequence[Measurement], metric: str, subject: str) -> Measurement:
    (match,) = [m for m in found if m.metric == metric and m.subject == subject]
    return match
