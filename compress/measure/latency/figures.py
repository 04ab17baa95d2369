"""The figures of a finished latency run: medians and tails per variant, paired ratios, the noise floor, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from compress.measure.latency.independence import dependent_quantile, independent_count
from compress.measure.latency.ratios import paired_ratio
from compress.measure.latency.raw import Loaded
from compress.measure.latency.schedule import CPU, Round, Run, log_ratios, quiet, values_of
from compress.measure.latency.settings import TIMES, Variant, Workload
from compress.measure.statistics import Estimate, carries_percentile, count_for_percentile
from compress.records import Measurement

MS = 1000.0
BYTES_PER_MB = 1_000_000
TAILS = {"p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Timing:
    """A finished run of one workload and what it holds for.

    Attributes:
        original_labels: variants that are the original; the others are results.
        loads: how each variant was loaded.
        peaks: peak resident bytes of each variant's process; None where the system does not tell.
        conditions: what is common to all variants (device, threads, ...).
        levels: one-sided confidence levels of the bounds.
        earlier: workloads that were measured before this one in the same processes.
    """

    run: Run
    variants: Sequence[Variant]
    original_labels: Sequence[str]
    workload: Workload
    loads: Sequence[Loaded]
    peaks: Sequence[int | None]
    conditions: Mapping[str, Any]
    levels: Sequence[float] = (0.95,)
    earlier: int = 0

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Those that count."""
        return quiet(self.run.rounds)

    @cached_property
    def floor(self) -> tuple[Round, ...]:
        return quiet(self.run.floor)

    @property
    def originals(self) -> list[int]:
        return [index for index, one in enumerate(self.variants) if one.label in self.original_labels]

    @property
    def results(self) -> list[int]:
        return [index for index, one in enumerate(self.variants) if one.label not in self.original_labels]

    def subject(self, variant: int) -> str:
        return "original" if variant in self.originals else "result"

    def facts(self, variant: int) -> dict[str, Any]:
        one, work = self.variants[variant], self.workload
        lengths = {"prompt": work.prompt, "new_tokens": work.new_tokens, "batch": work.batch}
        counts = {"rounds": len(self.rounds), "rounds_left_out": len(self.run.rounds) - len(self.rounds)}
        own = {"variant": one.label, "dtype": one.dtype, "loader": one.loader}
        return dict(self.conditions) | lengths | counts | own | {"engine": self.loads[variant].engine}


def latency_measurements(timing: Timing) -> list[Measurement]:
    """All figures of a workload.

    For each variant, subject "original" or "result": latency.* (ms, median) with its p90 and p99, throughput.* and
    memory.peak. Subject "result/original": latency.*.ratio and cpu.ratio of each result against the original in its
    own dtype and then, where that is another, against the fastest original (conditions["comparison"] says which).
    Subject "original/original": latency.*.ratio of the original against itself, the noise floor.
    """
    found: list[Measurement] = []
    indices = range(len(timing.variants))
    for name in TIMES[timing.workload.kind]:
        if name == "tpot" and timing.workload.new_tokens == 1:
            note = "one new token has no time per output token"
            found += [
                Measurement(metric, timing.subject(i), None, conditions=timing.facts(i), note=note)
                for i in indices
                for metric in ("latency.tpot", "throughput.decode")
            ]
            continue
        found += [one for i in indices for one in _times(timing, i, name)]
        found += _ratios(timing, f"latency.{name}.ratio", name)
        found.append(_floor(timing, name))
    found += _ratios(timing, "cpu.ratio", CPU)
    return found + [_peak(timing, i) for i in indices]


def load_measurements(
    variants: Sequence[Variant],
    loads: Sequence[Loaded],
    original_labels: Sequence[str],
    conditions: Mapping[str, Any],
) -> list[Measurement]:
    """latency.load (ms) of each variant."""
    note = "read once, from a disk or from the system's file cache, whichever held the files"
    return [
        Measurement(
            "latency.load",
            "original" if one.label in original_labels else "result",
            MS * load.seconds,
            1,
            conditions=dict(conditions)
            | {"variant": one.label, "dtype": one.dtype, "loader": one.loader, "engine": load.engine},
            note=note,
        )
        for one, load in zip(variants, loads, strict=True)
    ]


def _times(timing: Timing, variant: int, name: str) -> Iterator[Measurement]:
    """Median, tails and, for ttft and tpot, throughput of one variant."""
    values = values_of(timing.rounds, variant, name)
    count, subject, facts = independent_count(values), timing.subject(variant), timing.facts(variant)
    median = dependent_quantile(values, 0.5, count, levels=timing.levels)
    warm = timing.run.warm_ups[variant]
    note = None if warm.stable else f"not yet stable after {len(warm.samples)} warm-up samples"
    yield _measurement(f"latency.{name}", subject, median.map(_milliseconds), count, facts, note)
    for tail, q in TAILS.items():
        metric = f"latency.{name}.{tail}"
        if carries_percentile(count, q):
            estimate = dependent_quantile(values, q, count, levels=timing.levels)
            yield _measurement(metric, subject, estimate.map(_milliseconds), count, facts)
        else:
            why = f"needs {count_for_percentile(q)} independent values, there are {count}"
            yield Measurement(metric, subject, None, count, conditions=facts, note=why)
    tokens = {"ttft": timing.workload.prompt, "tpot": 1}
    metrics = {"ttft": "throughput.prefill", "tpot": "throughput.decode"}
    if name in tokens:
        rate = _per_second(median, timing.workload.batch * tokens[name])
        yield _measurement(metrics[name], subject, rate, count, facts, note)


def _milliseconds(seconds: float) -> float:
    return MS * seconds


def _per_second(seconds: Estimate, tokens: int) -> Estimate:
    """Tokens per second: what is slowest becomes least, so low and high change places."""
    negative = seconds.map(lambda value: -tokens / value)  # increasing, as `map` asks
    interval = negative.interval
    if interval is not None:
        interval = type(interval)(-interval.high, -interval.low, interval.level, interval.method)
    bounds = {level: (-high, -low) for level, (low, high) in negative.one_sided.items()}
    return Estimate(-negative.value, interval, bounds)


def _ratios(timing: Timing, metric: str, name: str) -> list[Measurement]:
    """Each result against the original of its dtype, and against the fastest original where that is another.

    The fastest is that of this very time; of CPU time, the one that a user would run: the least time on the wall.
    """
    raced = TIMES[timing.workload.kind][-1] if name == CPU else name
    return [
        _ratio(timing, metric, name, result, other, words)
        for result, comparisons in _comparisons(timing, raced).items()
        for other, words in comparisons.items()
    ]


def reported_pairs(timing: Timing) -> list[tuple[int, int]]:
    """(result, original) of all ratios of the compared times that are reported."""
    found = [_comparisons(timing, name) for name in timing.workload.compared]
    return sorted({(result, other) for one in found for result, others in one.items() for other in others})


def _comparisons(timing: Timing, raced: str) -> dict[int, dict[int, str]]:
    """{result: {original: what the comparison is}}."""
    fastest = min(timing.originals, key=lambda i: float(np.median(values_of(timing.rounds, i, raced))))
    found = {}
    for result in timing.results:
        dtype = timing.variants[result].dtype
        same = next((i for i in timing.originals if timing.variants[i].dtype == dtype), None)
        if same is None:
            comparisons = {fastest: "fastest original"}
        elif same == fastest:
            comparisons = {same: "same dtype, which is the fastest original"}
        else:
            comparisons = {same: "same dtype", fastest: "fastest original"}
        found[result] = comparisons
    return found


def _ratio(timing: Timing, metric: str, name: str, result: int, original: int, comparison: str) -> Measurement:
    facts = timing.facts(result) | {
        "original": timing.variants[original].label,
        "original_dtype": timing.variants[original].dtype,
        "comparison": comparison,
    }
    if name == CPU and not _all_positive(timing.rounds, (result, original)):
        coarse = "this system's clock of CPU time is too coarse for so short a sample"
        return Measurement(metric, "result/original", None, conditions=facts, note=coarse)
    ratios = log_ratios(timing.rounds, result, original, name)
    estimate = paired_ratio(ratios, levels=timing.levels)
    out, all_rounds = facts["rounds_left_out"], len(timing.run.rounds)
    note = f"{out} of {all_rounds} rounds left out: others held the CPUs meanwhile" if out else None
    return _measurement(metric, "result/original", estimate, len(ratios), facts, note)


def _all_positive(rounds: Sequence[Round], variants: Sequence[int]) -> bool:
    """NaN, which stands for what was not told, is not positive either."""
    return all(bool((values_of(rounds, variant, CPU) > 0).all()) for variant in variants)


def _floor(timing: Timing, name: str) -> Measurement:
    ratios = log_ratios(timing.floor, 1, 0, name)
    facts = timing.facts(timing.run.floor_of) | {
        "rounds": len(ratios),
        "rounds_left_out": len(timing.run.floor) - len(ratios),
        "comparison": "the original against itself",
    }
    estimate = paired_ratio(ratios, levels=timing.levels)
    note = "noise floor: what this machine shows where nothing differs"
    return _measurement(f"latency.{name}.ratio", "original/original", estimate, len(ratios), facts, note)


def _peak(timing: Timing, variant: int) -> Measurement:
    peak, facts = timing.peaks[variant], timing.facts(variant)
    if peak is None:
        note = "this system does not tell the peak memory of a process"
        return Measurement("memory.peak", timing.subject(variant), None, conditions=facts, note=note)
    high_water = f"a high-water mark, the {timing.earlier} workloads before included" if timing.earlier else None
    return Measurement(
        "memory.peak", timing.subject(variant), peak / BYTES_PER_MB, 1, conditions=facts, note=high_water
    )


def _measurement(
    metric: str,
    subject: str,
    estimate: Estimate,
    count: int,
    conditions: Mapping[str, Any],
    note: str | None = None,
) -> Measurement:
    return Measurement(metric, subject, estimate.value, count, estimate.interval, estimate.one_sided, conditions, note)
