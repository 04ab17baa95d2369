"""When a ratio is known well enough, and what to say when it is not.

The rule is about the width of the interval alone and never asks whether the interval excludes 1, so looking often
cannot favour a finding. What it can do is stop at a moment at which the spread happens to look small; therefore there
are few looks (after 12, 18, 27, 41, ... rounds, growing by half) and each must show the width at 99 % confidence, about
Pocock's level for ten looks ("Group sequential methods", Biometrika 64, 1977: 0.0106). The figures keep 95 %.
`scripts/bench_measurement.py` shows the rate of false alarms with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from compress.measure.latency.independence import dependent_quantile, independent_count
from compress.measure.latency.ratios import paired_ratio
from compress.measure.latency.schedule import Enough, Round, log_ratios, quiet, values_of
from compress.measure.statistics import Estimate

FIRST_LOOK, GROWTH, LOOK_LEVEL = 12, 1.5, 0.99
Comparison = tuple[int, int]
"""Variant in the numerator, variant in the denominator."""


@dataclass(frozen=True)
class Known:
    """The figure that is known least. `half_width` is that of its logarithm; infinite where there is no interval."""

    what: str
    half_width: float
    rounds: int


def is_look(rounds: int) -> bool:
    """Whether a run may stop after so many rounds: 12, 18, 27, 41, 61, 92, ..."""
    looks = (math.ceil(FIRST_LOOK * GROWTH**step) for step in itertools.count())
    return next(look for look in looks if look >= rounds) == rounds


def enough_at(precision: float, comparisons: Sequence[Comparison], names: Sequence[str]) -> Enough:
    """Stops at the first look at which everything compared is known to `precision` (relative, 0.02)."""

    def enough(rounds: Sequence[Round]) -> bool:
        if not is_look(len(rounds)):
            return False
        return least_known(rounds, comparisons, names, LOOK_LEVEL).half_width <= math.log1p(precision)

    return enough


def least_known(
    rounds: Sequence[Round], comparisons: Sequence[Comparison], names: Sequence[str], level: float = 0.95
) -> Known:
    """Of all ratios, or of the medians where nothing is compared, the one with the widest interval."""
    kept = quiet(rounds)
    found = [
        Known(f"the ratio of {name}", half_width(_ratio(kept, one, name, level)), len(kept))
        for one in comparisons
        for name in names
    ]
    if not comparisons:
        variants = sorted({variant for variant, _ in kept[0]})
        found = [
            Known(f"the median of {name}", half_width(_median(kept, variant, name, level)), len(kept))
            for variant in variants
            for name in names
        ]
    return max(found, key=lambda known: known.half_width)


def half_width(estimate: Estimate) -> float:
    """Of the logarithm of a positive figure; 0.02 is about +-2 %."""
    interval = estimate.interval
    return math.inf if interval is None else math.log(interval.high / interval.low) / 2


def noise_of(
    precision: float,
    rounds: Sequence[Round],
    floor: Sequence[Round],
    comparisons: Sequence[Comparison],
    names: Sequence[str],
    *,
    round_seconds: float,
) -> str | None:
    """Why a finished run does not meet `precision`, in one sentence; None if it does."""
    wanted = math.log1p(precision)
    off = [sentence for name in names if (sentence := _floor_off(floor, name, wanted)) is not None]
    known = least_known(rounds, comparisons, names)
    if known.half_width > wanted:
        off.append(_unknown(known, wanted, round_seconds))
    return f"machine too noisy for {_percent(wanted)}: {'; '.join(off)}" if off else None


def rounds_needed(known: Known, precision: float) -> int | None:
    """k = (1.96 s / ln(1 + precision))^2, with s the spread of one round that the known interval implies."""
    if not math.isfinite(known.half_width):
        return None
    return math.ceil(known.rounds * (known.half_width / math.log1p(precision)) ** 2)


def _unknown(known: Known, wanted: float, round_seconds: float) -> str:
    needed = rounds_needed(known, math.expm1(wanted))
    if needed is None:
        return f"{known.what} has no interval after {known.rounds} blocks"
    minutes = needed * round_seconds / 60
    return (
        f"{known.what} is known to {_percent(known.half_width)} after {known.rounds} blocks; "
        f"about {needed} blocks ({minutes:.2g} min) would be needed"
    )


def _floor_off(floor: Sequence[Round], name: str, wanted: float) -> str | None:
    """The original against itself must not differ, beyond doubt, by more than what is asked for."""
    estimate = _ratio(quiet(floor), (1, 0), name, 0.95)
    interval = estimate.interval
    if interval is None or (math.log(interval.low) <= wanted and math.log(interval.high) >= -wanted):
        return None
    span = f"{interval.low:.4g} to {interval.high:.4g}"
    return f"the original against itself shows a ratio of {name} of {estimate.value:.4g} ({span})"


def _ratio(rounds: Sequence[Round], of: Comparison, name: str, level: float) -> Estimate:
    return paired_ratio(log_ratios(rounds, *of, name), level=level)


def _median(rounds: Sequence[Round], variant: int, name: str, level: float) -> Estimate:
    values = values_of(rounds, variant, name)
    return dependent_quantile(values, 0.5, independent_count(values), level=level)


def _percent(log_width: float) -> str:
    return f"{100 * math.expm1(log_width):.2g}%"
