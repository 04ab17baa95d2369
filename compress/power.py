"""How many items a paired comparison needs, and what a number of them can show. Pure arithmetic, no torch.

    n = (z_{1 - alpha} + z_{1 - beta})^2 (pi - D^2) / (m - D)^2        items to decide against the margin m
    m = (z_{1 - alpha} + z_{1 - beta}) sqrt(pi / n)                    smallest drop that n items find

with pi the share of items that flip, D the true drop (0 under "nothing got worse"), alpha one-sided, 1 - beta the power
(Miller, "Adding error bars to evals", 2024, section 5; Connor, Biometrics 43, 1987, for pairs).
"""

from __future__ import annotations

import math
from statistics import NormalDist

LEVEL, POWER = 0.95, 0.8
USUAL_FLIPS = 0.05
"""Share of items that flip when a model is quantized well: what a plan assumes before anything was measured."""


def items_for_drop(drop: float, flips: float, *, level: float = LEVEL, power: float = POWER) -> int:
    """Items that a true change of `drop` needs to be told from nothing; both are shares (0.02 for 2 points).

    Raises:
        ValueError: drop is not above 0, or |drop| > flips, which cannot be.
    """
    if drop <= 0 or flips < drop:
        raise ValueError(f"a drop of {drop} with flips of {flips} cannot be")
    return math.ceil(_z(level, power) ** 2 * (flips - drop**2) / drop**2)


def detectable_drop(items: int, flips: float, *, level: float = LEVEL, power: float = POWER) -> float | None:
    """The smallest drop, as a share, that `items` items find; None where nothing flips. Never above `flips` or 1."""
    if items < 1:
        raise ValueError("no items")
    if flips <= 0:
        return None
    return min(1.0, _z(level, power) * math.sqrt(flips / items))


def unpaired_items_for_drop(drop: float, accuracy: float, *, level: float = LEVEL, power: float = POWER) -> int:
    """Items of each of two independent samples around `accuracy`: what a comparison that is not paired would need."""
    if drop <= 0:
        raise ValueError(f"a drop of {drop} cannot be")
    return math.ceil(2 * _z(level, power) ** 2 * accuracy * (1 - accuracy) / drop**2)


def count_to_decide(count: int, value: float, bound: float, threshold: float) -> int | None:
    """About how many items (tokens, blocks) bring `bound` to `threshold`, if `value` stays as it is.

    Half-widths shrink with the square root of the count: n = count ((bound - value) / (threshold - value))^2. None
    where the value lies on the threshold, which no number of items decides.
    """
    if not all(map(math.isfinite, (value, bound, threshold))) or value == threshold:
        return None
    needed = count * ((bound - value) / (threshold - value)) ** 2
    return math.ceil(needed) if math.isfinite(needed) and needed < 1e15 else None


def _z(level: float, power: float) -> float:
    normal = NormalDist()
    return normal.inv_cdf(level) + normal.inv_cdf(power)
