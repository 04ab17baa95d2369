"""Gates and measurements -> one verdict. Text, JSON and the exit code all render the same object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from compress.errors import EXIT_GATE_FAILED, EXIT_INCONCLUSIVE, EXIT_NOISY_MACHINE, EXIT_OK
from compress.metrics import METRICS
from compress.power import count_to_decide
from compress.recipe.gates import Gate
from compress.records import PAIRED, RESULT, WORKLOAD, Measurement

JUDGED_SUBJECTS = (RESULT, PAIRED)


class Outcome(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"


_EXIT_CODES = {
    Outcome.PASS: EXIT_OK,
    Outcome.FAIL: EXIT_GATE_FAILED,
    Outcome.INCONCLUSIVE: EXIT_INCONCLUSIVE,
}
_SPEED = ("latency.", "throughput.", "cpu.")
_COUNTED = {
    "kl": "tokens",
    "tv": "tokens",
    "top1": "tokens",
    "perplexity": "tokens",
    "cosine": "texts",
    "similarity": "texts",
    "ndcg": "queries",
    "accuracy": "items",
    "generation": "prompts",
}
"""What a measurement of each family counts."""
_HOPELESS = 10_000
_WORST_FIRST = (Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS)


@dataclass(frozen=True)
class GateResult:
    """One gate, judged.

    Attributes:
        measurement: what was judged; None if nothing was measured.
        reason: the comparison that decided, or why none was possible.
    """

    gate: Gate
    outcome: Outcome
    measurement: Measurement | None
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The answer of a run.

    Attributes:
        headline: one line of text.
        noise: why the machine did not give the precision that was asked of it, or None.
        unfinished: what did not come to its end, and why, or None.
    """

    outcome: Outcome
    gates: tuple[GateResult, ...]
    headline: str
    noise: str | None = None
    unfinished: str | None = None

    @property
    def exit_code(self) -> int:
        """Of the worst gate; where no gate is worse than passed, noise has the last word."""
        undecided = self.unfinished is not None or any(result.outcome is not Outcome.PASS for result in self.gates)
        return EXIT_NOISY_MACHINE if self.noise and not undecided else _EXIT_CODES[self.outcome]


def judge(
    gates: Sequence[Gate],
    measurements: Sequence[Measurement],
    noise: str | None = None,
    *,
    unfinished: str | None = None,
) -> Verdict:
    """Judges every gate; the verdict is its worst outcome, FAIL before INCONCLUSIVE.

    A gate without `@LEVEL` compares the point estimate. With it, it passes if the one-sided bound lies on the
    good side, fails if the other bound lies on the bad side, and is inconclusive otherwise. A number that is not
    finite fails; one that is missing, or has no bound at the level, is inconclusive: neither passes in silence.

    Where a metric was measured in several variants (dtypes), speed is judged as one would run the two models:
    the result in its fastest variant against the original in its fastest; everything else in its worst variant. Of
    several workloads (prompts, batches) the worst counts.

    Args:
        noise: why the machine was too noisy for the precision that was asked; makes a verdict without a failing gate
            INCONCLUSIVE.
        unfinished: what did not come to its end, and why; does the same: what was not measured has not passed.
    """
    results = tuple(_judge_gate(gate, measurements) for gate in gates)
    outcomes = [result.outcome for result in results] + ([Outcome.INCONCLUSIVE] if noise or unfinished else [])
    outcome = next((one for one in _WORST_FIRST if one in outcomes), Outcome.PASS)
    return Verdict(outcome, results, _headline(outcome, results, unfinished or noise), noise, unfinished)


def _judge_gate(gate: Gate, measurements: Sequence[Measurement]) -> GateResult:
    candidates = [
        one
        for one in measurements
        if one.metric == gate.metric and one.task == gate.task and one.subject in JUDGED_SUBJECTS
    ]
    if not candidates:
        return GateResult(gate, Outcome.INCONCLUSIVE, None, f"{gate.name} was not measured")
    if len(candidates) == 1:
        return _judge_one(gate, candidates[0])
    if gate.metric.startswith(_SPEED):
        fastest = [_fastest(group) for group in _by_workload(candidates)]
        judged = min((_judge_one(gate, one) for one in fastest), key=_goodness)
        which = "the fastest" if len(fastest) == 1 else f"the worst of {len(fastest)} workloads, each the fastest"
        which += f" of {len(candidates)} comparisons{_variants(judged.measurement)}"
    else:
        judged = min((_judge_one(gate, candidate) for candidate in candidates), key=_goodness)
        which = f"the worst of {len(candidates)} measurements{_variants(judged.measurement)}"
    return GateResult(gate, judged.outcome, judged.measurement, f"{judged.reason} ({which})")


def _by_workload(candidates: Sequence[Measurement]) -> list[list[Measurement]]:
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for one in candidates:
        groups.setdefault(tuple(one.conditions.get(name) for name in WORKLOAD), []).append(one)
    return list(groups.values())


def _fastest(candidates: Sequence[Measurement]) -> Measurement:
    """The best value, of the comparisons with the fastest original where there are any."""
    fair = [one for one in candidates if "fastest original" in str(one.conditions.get("comparison", ""))]
    return min(fair or candidates, key=_slowness)


def _slowness(measurement: Measurement) -> float:
    """Sorts a missing value last and one that is not a number first, so that it is judged and fails."""
    value = measurement.value
    if value is None:
        return math.inf
    if math.isnan(value):
        return -math.inf
    return -value if METRICS[measurement.metric].better == "higher" else value


def _variants(measurement: Measurement | None) -> str:
    """`: result bfloat16, original float32`."""
    conditions: Mapping[str, Any] = measurement.conditions if measurement else {}
    names = [str(conditions[key]) for key in ("variant", "original") if key in conditions]
    names += [f"{key.replace('_', ' ')} {conditions[key]}" for key in WORKLOAD if key in conditions]
    return f": {', '.join(names)}" if names else ""


def _judge_one(gate: Gate, measurement: Measurement) -> GateResult:
    value = measurement.value
    if value is None:
        reason = f"{gate.name} could not be measured: {measurement.note or 'no reason was recorded'}"
        return GateResult(gate, Outcome.INCONCLUSIVE, measurement, reason)
    if not math.isfinite(value):
        return GateResult(gate, Outcome.FAIL, measurement, f"{gate.name} is {value}, not a finite number")
    if gate.level is not None:
        return _judge_bounds(gate, measurement, value, gate.level)
    holds = gate.holds(value)
    outcome = Outcome.PASS if holds else Outcome.FAIL
    return GateResult(gate, outcome, measurement, _compared(gate, gate.name, value, holds))


def _judge_bounds(gate: Gate, measurement: Measurement, value: float, level: float) -> GateResult:
    percent = f"{level * 100:.10g}%"
    bounds = _bounds_at(measurement.one_sided, level)
    if bounds is None or any(math.isnan(bound) for bound in bounds):
        reason = f"{gate.name} has no one-sided {percent} bound"
        return GateResult(gate, Outcome.INCONCLUSIVE, measurement, reason)
    lower, upper = bounds
    worst, best = ("upper", "lower") if gate.op in ("<", "<=") else ("lower", "upper")
    at = {"lower": lower, "upper": upper}
    for side, outcome in ((worst, Outcome.PASS), (best, Outcome.FAIL)):
        holds = gate.holds(at[side])
        if holds == (outcome is Outcome.PASS):
            name = f"the {side} {percent} bound of {gate.name}"
            return GateResult(gate, outcome, measurement, _compared(gate, name, at[side], holds))
    reason = (
        f"the bounds of {gate.name}, {_number(gate, lower)} and {_number(gate, upper)} at {percent} each, "
        f"lie on both sides of {_number(gate, gate.value)}{_needed(gate, measurement, value, lower, upper)}"
    )
    return GateResult(gate, Outcome.INCONCLUSIVE, measurement, reason)


def _needed(gate: Gate, measurement: Measurement, value: float, lower: float, upper: float) -> str:
    """How many items would decide, if the estimate stays: the bound that lies across the gate's value must reach it."""
    if measurement.count is None:
        return ""
    below = value < gate.value
    needed = count_to_decide(measurement.count, value, upper if below else lower, gate.value)
    unit = _COUNTED.get(gate.metric.split(".")[0], "rounds")
    has = f"there are {measurement.count:,} {unit}"
    if needed is None or needed > _HOPELESS * measurement.count:
        return f"; {has}, and no affordable number would decide if the estimate stays there"
    return f"; {has}, about {needed:,} would decide if the estimate stays there"


def _bounds_at(one_sided: Mapping[float, tuple[float, float]], level: float) -> tuple[float, float] | None:
    near = (bounds for known, bounds in one_sided.items() if math.isclose(known, level, rel_tol=1e-9))
    return next(near, None)


def _goodness(result: GateResult) -> tuple[int, float]:
    """Sorts the worst result first: by outcome, then by distance to the bad side."""
    value = result.measurement.value if result.measurement else None
    if value is None or math.isnan(value):
        value = -math.inf
    elif result.gate.op in ("<", "<="):
        value = -value
    return _WORST_FIRST.index(result.outcome), value


def _compared(gate: Gate, name: str, value: float, holds: bool) -> str:
    return f"{name} is {_number(gate, value)}, {'' if holds else 'not '}{gate.op} {_number(gate, gate.value)}"


def _number(gate: Gate, value: float) -> str:
    """`value` with its unit, in enough digits to be seen on the right side of the gate's value."""
    texts = [*(_rounded(value, digits) for digits in range(4, 16)), repr(value)]
    text = next(text for text in texts if _order(float(text), gate) == _order(value, gate))
    unit = METRICS[gate.metric].unit
    return f"{text}{'' if unit in ('', 'nats', 'bits') else unit}"


def _rounded(value: float, digits: int) -> str:
    """At least `digits` significant digits, and all digits before the point."""
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, max(0, decimals)):.15g}"


def _order(value: float, gate: Gate) -> int:
    return (value > gate.value) - (value < gate.value)


def _headline(outcome: Outcome, results: Sequence[GateResult], trouble: str | None) -> str:
    gates = _gates_headline(results)
    if trouble is None:
        return gates
    return f"{gates}; {trouble}" if outcome is Outcome.FAIL else f"{outcome}: {trouble}; gates: {gates}"


def _gates_headline(results: Sequence[GateResult]) -> str:
    outcome = next((one for one in _WORST_FIRST if any(one == result.outcome for result in results)), Outcome.PASS)
    if not results:
        return "PASS: no gate was asked, so nothing was judged"
    decisive = [result for result in results if result.outcome == outcome]
    gates = "gate" if len(results) == 1 else "gates"
    if outcome is Outcome.PASS:
        return f"PASS: {'the gate' if len(results) == 1 else f'all {len(results)} gates'} passed"
    verb = {Outcome.FAIL: "failed", Outcome.INCONCLUSIVE: "could not be decided"}[outcome]
    reasons = "; ".join(result.reason for result in decisive)
    return f"{outcome}: {len(decisive)} of {len(results)} {gates} {verb}: {reasons}"
