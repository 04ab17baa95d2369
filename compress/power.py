"""How many items a paired comparison needs, and what a number of them can show. Pure arithmetic, no torch.

A drop counts as *found* when the exact one-sided McNemar test gives p < 0.05: among m flips, b losses or more would
be that rare if losses and gains were equally likely. With n items, a share pi of flips and a true drop D the flips are
binomial (n, pi) and the losses among them binomial (m, (1 + D / pi) / 2), so the power is a sum over both (Connor,
Biometrics 43, 1987; beyond EXACT_FLIPS expected flips by the normal approximation).

A gate `drop <= m @95%` *passes* when the score bound of Tango (Statistics in Medicine 17, 1998) lies below m; if in
truth nothing got worse, that needs about n = ((z_a s_m + z_b s_0) / m)^2 items, with s_m^2 the variance of an item's
difference under a drop of m (restricted to it as Tango does) and s_0^2 = pi.
"""

from __future__ import annotations

import math
from statistics import NormalDist

LEVEL, POWER = 0.95, 0.8
USUAL_FLIPS = 0.05
"""Share of items that flip when a model is quantized well: what a plan assumes before anything was measured."""
EXACT_FLIPS = 400
MOST_ITEMS = 10**9


def find_power(items: int, drop: float, flips: float) -> float:
    """Chance that `items` items find a true drop.

    Args:
        drop, flips: shares of the items; there are never fewer flips than the drop.
    """
    flips = max(flips, drop)
    if items * flips > EXACT_FLIPS:
        return _normal_power(items, drop, flips)
    lost, spread = (1 + drop / flips) / 2, 8 * math.sqrt(items * flips) + 8
    least, most = max(1, int(items * flips - spread)), min(items, int(items * flips + spread))
    return sum(
        _binomial(items, count, flips) * _tail(count, losses, lost)
        for count in range(least, most + 1)
        if (losses := _critical(count)) is not None
    )


def items_for_drop(drop: float, flips: float) -> int:
    """Items that find a true drop in POWER of all runs; both are shares (0.02 for 2 points).

    Raises:
        ValueError: drop is not above 0 and at most 1.
    """
    if not 0 < drop <= 1:
        raise ValueError(f"a drop of {drop} cannot be")
    high = 2
    while find_power(high, drop, flips) < POWER and high < MOST_ITEMS:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if find_power(middle, drop, flips) >= POWER else (middle, high)
    return high


def detectable_drop(items: int, flips: float) -> float | None:
    """The smallest drop, as a share, that `items` items find in POWER of all runs; None where they find none.

    Raises:
        ValueError: there are no items.
    """
    if items < 1:
        raise ValueError("no items")
    low, high = 0.0, 1.0
    if find_power(items, high, flips) < POWER:
        return None
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if find_power(items, middle, flips) >= POWER else (middle, high)
    return high


def items_to_pass(margin: float, flips: float) -> int:
    """Items with which a gate on a drop of `margin` passes in POWER of all runs if nothing got worse; both are shares.

    Raises:
        ValueError: margin is not above 0 and below 1.
    """
    if not 0 < margin < 1:
        raise ValueError(f"a margin of {margin} cannot be")
    # Tango's restricted estimate for expected counts: losses and gains of flips / 2 each.
    b, c = 2 * margin - flips, -flips / 2 * margin * (1 - margin)
    gains = (math.sqrt(b * b - 8 * c) - b) / 4
    under_margin = 2 * gains + margin * (1 - margin)
    return math.ceil(((_z(LEVEL) * math.sqrt(under_margin) + _z(POWER) * math.sqrt(flips)) / margin) ** 2)


def unpaired_items_for_drop(drop: float, accuracy: float) -> int:
    """Items of each of two independent samples around `accuracy`: what a comparison that is not paired would need."""
    if not 0 < drop <= 1:
        raise ValueError(f"a drop of {drop} cannot be")
    return math.ceil(2 * (_z(LEVEL) + _z(POWER)) ** 2 * accuracy * (1 - accuracy) / drop**2)


def count_to_decide(count: int, value: float, bound: float, threshold: float) -> int | None:
    """About how many items (tokens, blocks) bring `bound` to `threshold`, if `value` stays as it is.

    Half-widths shrink with the square root of the count: n = count ((bound - value) / (threshold - value))^2. None
    where the value lies on the threshold, which no number of items decides.
    """
    if not all(map(math.isfinite, (value, bound, threshold))) or value == threshold:
        return None
    needed = count * ((bound - value) / (threshold - value)) ** 2
    return math.ceil(needed) if math.isfinite(needed) and needed < 1e15 else None


def _normal_power(items: int, drop: float, flips: float) -> float:
    """The same for many flips: the losses among m flips against their critical number, m at its mean."""
    count = items * flips
    critical = count / 2 + _z(LEVEL) * math.sqrt(count) / 2 + 0.5
    mean = items * (flips + drop) / 2
    spread = math.sqrt(items * (flips - drop**2)) / 2
    # b - m / 2 is half the difference of losses and gains, whose variance this is.
    return 1 - NormalDist().cdf((critical - count / 2 - (mean - count / 2)) / spread) if spread else 1.0


def _critical(count: int) -> int | None:
    """Fewest losses among `count` flips that McNemar's test finds too many; None where there are none."""
    total, chance = 0.0, 0.5**count
    for losses in range(count, -1, -1):
        total += chance
        if total > 1 - LEVEL:
            return losses + 1 if losses < count else None
        chance *= losses / (count - losses + 1)
    return 0


def _tail(count: int, least: int, share: float) -> float:
    """P[Bin(count, share) >= least]."""
    return math.fsum(_binomial(count, hits, share) for hits in range(least, count + 1))


def _binomial(count: int, hits: int, share: float) -> float:
    if share <= 0 or share >= 1:
        return float(hits == (count if share >= 1 else 0))
    logs = math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
    return math.exp(logs + hits * math.log(share) + (count - hits) * math.log1p(-share))


def _z(share: float) -> float:
    return NormalDist().inv_cdf(share)
