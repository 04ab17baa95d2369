"""Two reports side by side, typically of two commits: what changed, and whether that is more than noise.

Figures are compared only where they mean the same: one definition, one text, the same items, one machine for times.
The difference d = after - before of two estimates with intervals [l, u] gets the interval

    d - sqrt((after - l_after)^2 + (u_before - before)^2), d + sqrt((u_after - after)^2 + (before - l_before)^2)

(MOVER: Zou and Donner, Statistics in Medicine 27, 2008, section 2), which takes the two as independent. On the same
text or items they are not: their errors go together, and the interval is wider than it needs to be. As many figures are
compared at once, a change counts only if it survives Holm's correction over all that count (Scand. J. Stat. 6, 1979).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from compress.errors import EXIT_GATE_FAILED, EXIT_INCONCLUSIVE, EXIT_OK, UsageError
from compress.metrics import METRICS
from compress.recipe.units import UNITS_OF, parse_quantity
from compress.recipe.words import did_you_mean
from compress.records import PAIRED
from compress.report.comparison.comparable import COUNTED, judged, key_of, notes, why_not
from compress.report.digits import quantity
from compress.report.flat import name_of, variant
from compress.report.schema import MeasurementPart, Report
from compress.report.views import TELLING_APART, common_conditions

Status = Literal[
    "better", "worse", "changed", "same", "within noise", "within tolerance", "not decided", "not comparable"
]
GROWTH = 0.001
"""Sizes may grow by this share of themselves: headers of files do, and nobody wants to hear of it."""
INDEPENDENT = (
    "intervals of differences take the two runs as independent; on the same text or items they are wider than need be"
)


@dataclass(frozen=True)
class Side:
    """One of the two reports: `path` as the user gave it."""

    path: str
    output: str
    outcome: str
    exit_code: int
    headline: str
    created: str | None


@dataclass(frozen=True)
class GateChange:
    """A gate of either report; an outcome is None where it was not asked."""

    expression: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Difference:
    """after - before; `low` and `high` at `level`, or None where there is no interval. `p`: two-sided, of no change."""

    value: float
    low: float | None = None
    high: float | None = None
    level: float | None = None
    p: float | None = None


@dataclass(frozen=True)
class MetricChange:
    """One figure of both reports.

    Attributes:
        name: as a gate writes it, with whose it is: `accuracy[a].drop`, `size of result`.
        variant: the conditions that tell it from its like; empty where there is only one.
        counts: whether a worse value is a regression.
        reason: why it was not compared or not decided; empty where the numbers say it.
    """

    name: str
    variant: str
    unit: str
    better: str
    before: float
    after: float
    difference: Difference | None
    status: Status
    counts: bool
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Everything that differs between two reports.

    Attributes:
        missing, added: figures that only the first or only the second report has.
        notes: what was not compared, and what was assumed.
        regressions, undecided: why the exit code is 3 or 4, as sentences.
    """

    before: Side
    after: Side
    gates: tuple[GateChange, ...]
    metrics: tuple[MetricChange, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    notes: tuple[str, ...]
    regressions: tuple[str, ...]
    undecided: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_GATE_FAILED if self.regressions else EXIT_INCONCLUSIVE if self.undecided else EXIT_OK

    @property
    def headline(self) -> str:
        """The exit code in one line of words."""
        if self.regressions:
            return f"REGRESSION: {'; '.join(self.regressions)}"
        return f"INCONCLUSIVE: {'; '.join(self.undecided)}" if self.undecided else "NO REGRESSION"


def compare(
    before: Report,
    after: Report,
    *,
    paths: tuple[str, str] = ("before", "after"),
    tolerances: Mapping[str, float] | None = None,
) -> Comparison:
    """Compares two reports.

    Args:
        paths: the two reports as the user named them.
        tolerances: {metric: change in its unit} that a worse figure must exceed to count. With one, also a figure that
            has no interval, or is of the result alone, counts.
    """
    gates = gate_changes(before, after)
    metrics = metric_changes(before, after, tolerances or {})
    names = [{full_name(m) for m in report.measurements if m.value is not None} for report in (before, after)]
    dropped = [
        f"gate `{gate.expression}` passed and is no longer asked"
        for gate in gates
        if gate.after is None and gate.before == "PASS"
    ]
    intervals = [INDEPENDENT] if any(m.difference and m.difference.p is not None for m in metrics) else []
    return Comparison(
        before=side(before, paths[0]),
        after=side(after, paths[1]),
        gates=gates,
        metrics=metrics,
        missing=tuple(sorted(names[0] - names[1])),
        added=tuple(sorted(names[1] - names[0])),
        notes=(*notes(before, after), *intervals),
        regressions=(*turned(before, after, gates, "FAIL"), *worse(metrics)),
        undecided=(*turned(before, after, gates, "INCONCLUSIVE"), *dropped),
    )


def parse_tolerances(words: Sequence[str]) -> dict[str, float]:
    """`size=2MB` as {"size": 2.0}, in the metric's unit.

    Raises:
        UsageError: a word is not METRIC=VALUE, names no metric, or its value is negative or has a wrong unit.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"`{word}` is no tolerance: write METRIC=VALUE, such as `size=2MB` or `kl.mean=0.01`")
        if name not in METRICS:
            raise UsageError(f"tolerance `{word}`: unknown metric `{name}`{did_you_mean(name, METRICS)}")
        try:
            found[name] = float(parse_quantity(value, UNITS_OF[METRICS[name].unit]))
        except UsageError as error:
            raise UsageError(f"tolerance `{word}`: the value {error.message}") from error
        if not 0 <= found[name] < math.inf:
            raise UsageError(f"tolerance `{word}`: the value must be 0 or more")
    return found


def side(report: Report, path: str) -> Side:
    verdict = report.verdict
    return Side(path, report.output, verdict.outcome, verdict.exit_code, verdict.headline, report.created)


def gate_changes(before: Report, after: Report) -> tuple[GateChange, ...]:
    """Every gate of either report, in the order of the second."""
    first, second = ({gate.expression: gate.outcome for gate in report.verdict.gates} for report in (before, after))
    return tuple(GateChange(text, first.get(text), second.get(text)) for text in dict.fromkeys([*second, *first]))


def turned(before: Report, after: Report, gates: Sequence[GateChange], outcome: str) -> tuple[str, ...]:
    """The gates that now have `outcome` and had a better one, or else the verdict, if it has."""
    better = ("PASS", "INCONCLUSIVE") if outcome == "FAIL" else ("PASS",)
    lines = [
        f"gate `{gate.expression}` was {gate.before} and is {outcome}"
        for gate in gates
        if gate.after == outcome and gate.before in better
    ]
    if not lines and after.verdict.outcome == outcome and before.verdict.outcome in better:
        return (f"the verdict was {before.verdict.outcome} and is {outcome}",)
    return tuple(lines)


def worse(metrics: Sequence[MetricChange]) -> tuple[str, ...]:
    return tuple(
        f"{m.name}{f' ({m.variant})' if m.variant else ''} went from {quantity(m.before, m.unit)} "
        f"to {quantity(m.after, m.unit)}"
        for m in metrics
        if m.counts and m.status == "worse"
    )


def metric_changes(before: Report, after: Report, tolerances: Mapping[str, float]) -> tuple[MetricChange, ...]:
    """The figures that both reports have, in the order of the second."""
    first = {key_of(m): m for m in reversed(before.measurements) if m.value is not None}
    pairs = [(first[key_of(m)], m) for m in after.measurements if m.value is not None and key_of(m) in first]
    several = Counter(full_name(m) for _, m in pairs)
    shared = common_conditions([m for _, m in pairs])
    telling = [key for key in TELLING_APART if key not in shared]
    reasons = [why_not(before, after, a, b) for a, b in pairs]
    differences = [None if reason else difference(a, b) for (a, b), reason in zip(pairs, reasons, strict=True)]
    counting = [judged(b) or b.metric in tolerances for _, b in pairs]
    sure = significant(differences, counting)
    changes = []
    for i, (a, b) in enumerate(pairs):
        status, reason = judge(a, b, differences[i], sure=sure[i], tolerance=tolerances.get(b.metric))
        changes.append(
            MetricChange(
                name=full_name(b),
                variant=variant(b, telling) if several[full_name(b)] > 1 else "",
                unit=b.unit,
                better=b.better,
                before=value_of(a),
                after=value_of(b),
                difference=differences[i],
                status=status,
                counts=counting[i],
                reason=reasons[i] or reason,
            )
        )
    return tuple(changes)


def full_name(m: MeasurementPart) -> str:
    return name_of(m) if m.subject == PAIRED else f"{name_of(m)} of {m.subject}"


def value_of(m: MeasurementPart) -> float:
    return math.nan if m.value is None else m.value


def difference(a: MeasurementPart, b: MeasurementPart) -> Difference:
    """With an interval where both have one of the same level; see the equation on top."""
    d = value_of(b) - value_of(a)
    one, two = a.interval, b.interval
    if one is None or two is None or not math.isclose(one.level, two.level):
        return Difference(d)
    below = math.hypot(value_of(b) - two.low, one.high - value_of(a))
    above = math.hypot(two.high - value_of(b), value_of(a) - one.low)
    return Difference(d, d - below, d + above, two.level, p_value(d, below if d > 0 else above, two.level))


def p_value(d: float, half: float, level: float) -> float:
    """Two-sided, of no change, from the half of the interval that points to 0, by the normal distribution."""
    if d == 0 or half <= 0:
        return float(d == 0)
    normal = NormalDist()
    z = abs(d) / half * normal.inv_cdf((1 + level) / 2)
    return 2 * normal.cdf(-z)


def significant(differences: Sequence[Difference | None], counting: Sequence[bool]) -> list[bool]:
    """Which differences are more than noise: those that count by Holm's correction, the others one by one."""
    p_values = [None if d is None else d.p for d in differences]
    sure = [d is not None and d.p is not None and d.level is not None and d.p < 1 - d.level for d in differences]
    family = sorted((p, i) for i, p in enumerate(p_values) if p is not None and counting[i])
    holds = True
    for rank, (p, i) in enumerate(family):
        d = differences[i]
        holds = holds and d is not None and d.level is not None and p < (1 - d.level) / (len(family) - rank)
        sure[i] = holds
    return sure


def judge(
    a: MeasurementPart, b: MeasurementPart, d: Difference | None, *, sure: bool, tolerance: float | None
) -> tuple[Status, str]:
    """The status of one figure, and why where the numbers do not say it."""
    if d is None:
        return "not comparable", ""
    if d.value == 0:
        return "same", ""
    counted = b.metric in COUNTED
    if d.p is not None and not sure:
        return "within noise", ""
    if d.p is None and not counted and tolerance is None:
        return "not decided", "no interval"
    allowed = GROWTH * abs(value_of(a)) if counted and tolerance is None else tolerance or 0.0
    if abs(d.value) <= allowed:
        return "within tolerance", ""
    if b.better == "none":
        return "changed", ""
    return ("better" if (d.value < 0) == (b.better == "lower") else "worse"), ""
