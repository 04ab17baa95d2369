"""The figures of a finished latency run: medians per variant, paired ratios, the noise floor, peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from compress.measure.schedule import Run, Sample, log_ratios, values_of
from compress.measure.statistics import (
    Estimate,
    carries_percentile,
    order_statistic_quantile,
    paired_ratio,
)
from compress.records import Measurement

Kind = Literal["decoder", "encoder"]
METRICS: dict[str, tuple[str, ...]] = {"decoder": ("ttft", "tpot"), "encoder": ("forward",)}
"""What is timed, by the names in a Sample; in the table of metrics each is `latency.NAME`."""
MS = 1000.0
BYTES_PER_MB = 1_000_000


@dataclass(frozen=True)
class Variant:
    """One thing to time.

    Attributes:
        loader: "stock" is transformers' own from_pretrained; "reference" runs on dequantized weights.
        dtype: "float32", "bfloat16" or "float16".
    """

    label: str
    folder: Path
    loader: Literal["stock", "reference"]
    dtype: str


@dataclass(frozen=True)
class RawSample:
    """One timed sample. `variant` is a label; in phase "floor" the same label stands on both sides.

    Attributes:
        phase: "warm-up", "floor" or "measure".
        round: from 0; in the warm-up the number of the sample.
        side: which of the variants (0, 1, ...) the sample stands for in its phase.
        seconds: by name, never rounded.
    """

    phase: str
    round: int
    variant: str
    side: int
    seconds: Sample


@dataclass(frozen=True)
class LatencyRaw:
    """Everything that was timed, in order, and what it holds for."""

    samples: tuple[RawSample, ...]
    conditions: Mapping[str, Any]

    def raw(self) -> dict[str, Any]:
        """Plain data for a JSON file in the report folder."""
        rows = [
            {"phase": one.phase, "round": one.round, "variant": one.variant, "side": one.side} | dict(one.seconds)
            for one in self.samples
        ]
        return {"conditions": dict(self.conditions), "unit": "s", "samples": rows}


def raw_samples(run: Run, variants: Sequence[Variant]) -> tuple[RawSample, ...]:
    """Every sample of a run in the order it was taken."""
    rows = [
        RawSample("warm-up", number, variants[side].label, side, sample)
        for side, warm in enumerate(run.warm_ups)
        for number, sample in enumerate(warm.samples)
    ]
    same = variants[run.floor_of].label
    rows += [
        RawSample("floor", number, same, side, sample) for number, one in enumerate(run.floor) for side, sample in one
    ]
    rows += [
        RawSample("measure", number, variants[side].label, side, sample)
        for number, one in enumerate(run.rounds)
        for side, sample in one
    ]
    return tuple(rows)


@dataclass(frozen=True)
class Timing:
    """A finished run and what it holds for.

    Attributes:
        original_labels: variants that are the original; the others are results.
        engines: what ran each variant, in words.
        peaks: peak resident bytes of each variant's process; None where the system does not tell.
        conditions: what is common to all variants (device, threads, lengths).
        levels: one-sided confidence levels of the bounds.
    """

    run: Run
    variants: Sequence[Variant]
    original_labels: Sequence[str]
    kind: Kind
    engines: Sequence[str]
    peaks: Sequence[int | None]
    conditions: Mapping[str, Any]
    seed: int
    levels: Sequence[float] = (0.95,)

    def subject(self, variant: int) -> str:
        return "original" if self.variants[variant].label in self.original_labels else "result"

    def facts(self, variant: int) -> dict[str, Any]:
        one = self.variants[variant]
        own = {"variant": one.label, "dtype": one.dtype, "loader": one.loader, "engine": self.engines[variant]}
        return dict(self.conditions) | own


def latency_measurements(timing: Timing) -> list[Measurement]:
    """All figures of a run.

    latency.* (ms, median) and memory.peak for each variant, subject "original" or "result"; latency.*.ratio,
    subject "result/original", of each result against the original in its own dtype and then, where that is
    another, against the fastest original (conditions["comparison"] says which); and latency.*.ratio, subject
    "original/original": the noise floor.
    """
    found: list[Measurement] = []
    indices = range(len(timing.variants))
    for name in METRICS[timing.kind]:
        if any(name not in sample for _, sample in timing.run.rounds[0]):
            note = "one new token has no time per output token"
            found += [
                Measurement(f"latency.{name}", timing.subject(i), None, conditions=timing.facts(i), note=note)
                for i in indices
            ]
            continue
        found += [_median(timing, i, name) for i in indices]
        found += _ratios(timing, name)
        found.append(_floor(timing, name))
    return found + [_peak(timing, i) for i in indices]


def _median(timing: Timing, variant: int, name: str) -> Measurement:
    values = MS * values_of(timing.run.rounds, variant, name)
    estimate = order_statistic_quantile(values, levels=timing.levels)
    notes = []
    if carries_percentile(len(values), 0.9):
        notes.append(f"p90 {np.quantile(values, 0.9):.4g} ms")
    warm = timing.run.warm_ups[variant]
    if not warm.stable:
        notes.append(f"not yet stable after {len(warm.samples)} warm-up samples")
    return _measurement(
        f"latency.{name}",
        timing.subject(variant),
        estimate,
        len(values),
        timing.facts(variant),
        "; ".join(notes) or None,
    )


def _ratios(timing: Timing, name: str) -> list[Measurement]:
    """Each result against the original of its dtype, and against the fastest original where that is another."""
    indices = range(len(timing.variants))
    originals = [i for i in indices if timing.subject(i) == "original"]
    fastest = min(originals, key=lambda i: float(np.median(values_of(timing.run.rounds, i, name))))
    found = []
    for result in indices:
        if result in originals:
            continue
        dtype = timing.variants[result].dtype
        same = next((i for i in originals if timing.variants[i].dtype == dtype), None)
        if same is None:
            comparisons = {fastest: "fastest original"}
        elif same == fastest:
            comparisons = {same: "same dtype, which is the fastest original"}
        else:
            comparisons = {same: "same dtype", fastest: "fastest original"}
        found += [
            _ratio(timing, name, log_ratios(timing.run.rounds, result, other, name), result, other, words)
            for other, words in comparisons.items()
        ]
    return found


def _ratio(
    timing: Timing, name: str, ratios: npt.NDArray[np.float64], result: int, original: int, comparison: str
) -> Measurement:
    facts = timing.facts(result) | {
        "original": timing.variants[original].label,
        "original_dtype": timing.variants[original].dtype,
        "comparison": comparison,
    }
    estimate = paired_ratio(ratios, rng=np.random.default_rng(timing.seed), levels=timing.levels)
    return _measurement(f"latency.{name}.ratio", "result/original", estimate, len(ratios), facts)


def _floor(timing: Timing, name: str) -> Measurement:
    ratios = log_ratios(timing.run.floor, 1, 0, name)
    facts = timing.facts(timing.run.floor_of) | {
        "rounds": len(ratios),
        "comparison": "the original against itself",
    }
    estimate = paired_ratio(ratios, rng=np.random.default_rng(timing.seed), levels=timing.levels)
    note = "noise floor: what this machine shows where nothing differs"
    return _measurement(f"latency.{name}.ratio", "original/original", estimate, len(ratios), facts, note)


def _peak(timing: Timing, variant: int) -> Measurement:
    peak, facts = timing.peaks[variant], timing.facts(variant)
    if peak is None:
        note = "this system does not tell the peak memory of a process"
        return Measurement("memory.peak", timing.subject(variant), None, conditions=facts, note=note)
    return Measurement("memory.peak", timing.subject(variant), peak / BYTES_PER_MB, 1, conditions=facts)


def _measurement(
    metric: str,
    subject: str,
    estimate: Estimate,
    count: int,
    conditions: Mapping[str, Any],
    note: str | None = None,
) -> Measurement:
    return Measurement(metric, subject, estimate.value, count, estimate.interval, estimate.one_sided, conditions, note)
