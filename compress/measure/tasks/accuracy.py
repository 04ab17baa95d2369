"""Every figure that follows from two models' answers to the same items, for each task and pooled.

accuracy, flips      counted: exact binomial; with clusters, or over several tasks, the cluster bootstrap
drop                 Tango's paired score interval; likewise
recovery             ratio of sums over resampled clusters, no narrower than the drop's interval divided by what
                     the original has; not given where the original is not clearly above guessing
expected, margin     means over resampled clusters; where all items agree to the last digit, what n items leave open
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from compress.measure.statistics import Estimate, FloatArray, exact_share, from_draws
from compress.measure.tasks.answers import ItemPair, TaskPairs
from compress.measure.tasks.paired import (
    Clusters,
    cluster,
    constant_mean,
    holm,
    mcnemar_p,
    no_narrower,
    resampled_sums,
    score_drop,
)
from compress.records import ORIGINAL, PAIRED, RESULT, Interval, Measurement

FEWEST_SEEN = 10
"""Clusters in which something must be seen before its spread over clusters is believed."""
CLEARLY = 0.95
"""Confidence with which the original must lie above guessing before anything is divided by how far it does."""


@dataclass(frozen=True)
class _Answers:
    """The items of one task, or of several, as numbers.

    Attributes:
        columns: [N] each, by name; those of the choices are 0 where an item has none.
        draws: [draws] each, by name: the columns' sums over resampled clusters.
    """

    columns: Mapping[str, FloatArray]
    draws: Mapping[str, FloatArray]
    clusters: Clusters
    levels: Sequence[float]
    facts: Mapping[str, Any]
    task: str | None

    @property
    def count(self) -> int:
        return len(self.clusters.ids)

    def total(self, name: str) -> float:
        return float(self.columns[name].sum())


def task_measurements(
    pairs: Sequence[TaskPairs],
    *,
    levels: Sequence[float] = (),
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """All accuracy metrics, for each task and pooled over all of them (`Measurement.task` None).

    Pooled figures weigh every item alike. Their intervals resample clusters inside each task; with one task they are
    the task's own.

    Args:
        levels: one-sided confidence levels that gates ask for; 0.95 is always added.
        seed: of the resampling; each task starts from it anew, so none depends on which others are asked.
    """
    wanted = tuple(sorted({0.95, *levels}))
    facts = dict(conditions or {})
    found = []
    adjusted = holm([mcnemar_p(task.losses, task.gains) for task in pairs])
    for task, p in zip(pairs, adjusted, strict=True):
        own = facts | ({"mcnemar_p_holm": p} if len(pairs) > 1 else {})
        found += _measurements(_answers([task], wanted, seed, own, task.name))
    if len(pairs) == 1:
        return found + [replace(one, task=None) for one in found]
    return found + (_measurements(_answers(pairs, wanted, seed, facts, None)) if pairs else [])


def _answers(
    pairs: Sequence[TaskPairs], levels: Sequence[float], seed: int, facts: Mapping[str, Any], task: str | None
) -> _Answers:
    columns = _columns([item for one in pairs for item in one.items])
    names = [
        (index, ("item", place) if item.cluster is None else ("cluster", item.cluster))
        for index, one in enumerate(pairs)
        for place, item in enumerate(one.items)
    ]
    clusters = cluster(names)
    sums = resampled_sums(np.stack(list(columns.values()), axis=1), clusters, np.random.default_rng(seed))
    counts = {"items": len(names), "clusters": clusters.count}
    draws = dict(zip(columns, sums.T, strict=True))
    return _Answers(columns, draws, clusters, levels, dict(facts) | counts, task)


def _columns(items: Sequence[ItemPair]) -> dict[str, FloatArray]:
    def column(values: Sequence[float]) -> npt.NDArray[np.float64]:
        return np.array(values, dtype=np.float64)

    columns = {
        "items": column([1] * len(items)),
        "original": column([item.original.correct for item in items]),
        "result": column([item.result.correct for item in items]),
        "lost": column([item.lost for item in items]),
        "gained": column([item.gained for item in items]),
        "chance": column([item.chance or 0.0 for item in items]),
        "choices": column([_has_choices(item) for item in items]),
        "expected": column([item.original.probability or 0.0 if _has_choices(item) else 0.0 for item in items]),
        "expected_after": column([item.result.probability or 0.0 if _has_choices(item) else 0.0 for item in items]),
        "margin_shift": column([_margin_shift(item) for item in items]),
    }
    columns["flips"] = columns["lost"] + columns["gained"]
    columns["expected_drop"] = columns["expected"] - columns["expected_after"]
    return columns


def _has_choices(item: ItemPair) -> bool:
    both = (item.original, item.result)
    return all(one.probability is not None and one.margin is not None for one in both)


def _margin_shift(item: ItemPair) -> float:
    before, after = item.original.margin, item.result.margin
    return 0.0 if before is None or after is None or not _has_choices(item) else after - before


def _measurements(answers: _Answers) -> list[Measurement]:
    original, drop = _share(answers, "original"), _drop(answers)
    losses, gains = int(answers.total("lost")), int(answers.total("gained"))
    parts = (0.0, 1.0), (-1.0, 1.0)
    return [
        _made(answers, "accuracy", ORIGINAL, original.map(_hundred)),
        _made(answers, "accuracy", RESULT, _share(answers, "result").map(_hundred)),
        _made(answers, "accuracy.drop", PAIRED, drop.map(_hundred)),
        _made(answers, "accuracy.flips", PAIRED, _share(answers, "flips").map(_hundred)),
        _made(answers, "accuracy.losses", PAIRED, Estimate(losses)),
        _made(answers, "accuracy.gains", PAIRED, Estimate(gains)),
        _made(answers, "accuracy.mcnemar_p", PAIRED, Estimate(mcnemar_p(losses, gains))),
        _recovery(answers, "accuracy.recovery", drop, original, corrected=False),
        _recovery(answers, "accuracy.recovery_corrected", drop, original, corrected=True),
        _of_choices(answers, "accuracy.expected", ORIGINAL, "expected", parts[0]),
        _of_choices(answers, "accuracy.expected", RESULT, "expected_after", parts[0]),
        _of_choices(answers, "accuracy.expected_drop", PAIRED, "expected_drop", parts[1]),
        _of_choices(answers, "accuracy.margin_shift", PAIRED, "margin_shift", None),
    ]


def _made(
    answers: _Answers, metric: str, subject: str, estimate: Estimate, note: str | None = None, count: int | None = None
) -> Measurement:
    return Measurement(
        metric,
        subject,
        estimate.value,
        answers.count if count is None else count,
        estimate.interval,
        estimate.one_sided,
        answers.facts,
        note,
        answers.task,
    )


def _missing(answers: _Answers, metric: str, subject: str, note: str) -> Measurement:
    return Measurement(metric, subject, None, answers.count, conditions=answers.facts, note=note, task=answers.task)


def _weight(answers: _Answers, draws: FloatArray, variance: float, rarer: FloatArray) -> float:
    """What an item counts in a bound that knows no clusters: 1 / deff, at most 1.

    Where what is counted is seen in fewer than FEWEST_SEEN clusters, it cannot be seen how alike the items of a cluster
    are, and each cluster counts as one item.

    Args:
        draws: the resampled mean, [draws]; variance: of one item. rarer: [N], 1 for the rarer outcomes.
    """
    each = answers.clusters.count / answers.count
    if len(np.unique(answers.clusters.ids[rarer > 0])) < FEWEST_SEEN:
        return each
    spread = float(draws.var())
    return 1.0 if spread <= 0 else min(1.0, max(each, variance / answers.count / spread))


def _bootstrap(answers: _Answers, value: float, draws: FloatArray) -> Estimate:
    """Without bounds where a task has a single cluster: nothing tells how much clusters differ."""
    if answers.clusters.fewest < 2:
        return Estimate(value)
    words = f"cluster bootstrap, {answers.clusters.words}"
    return from_draws(value, draws, answers.clusters.count, answers.levels, 0.95, words)


def _share(answers: _Answers, name: str) -> Estimate:
    hits, count = answers.total(name), answers.count
    if answers.clusters.independent:
        return exact_share(hits, count, levels=answers.levels)
    share, draws = hits / count, answers.draws[name] / answers.draws["items"]
    column = answers.columns[name]
    weight = _weight(answers, draws, share * (1 - share), column if share <= 0.5 else 1 - column)
    counted = exact_share(weight * hits, weight * count, levels=answers.levels)
    return no_narrower(_bootstrap(answers, share, draws), counted)


def _drop(answers: _Answers) -> Estimate:
    losses, gains, count = answers.total("lost"), answers.total("gained"), answers.count
    if answers.clusters.independent:
        return score_drop(losses, gains, count, levels=answers.levels)
    drop, draws = (losses - gains) / count, (answers.draws["lost"] - answers.draws["gained"]) / answers.draws["items"]
    weight = _weight(answers, draws, (losses + gains) / count - drop**2, answers.columns["flips"])
    scored = score_drop(weight * losses, weight * gains, weight * count, levels=answers.levels)
    return no_narrower(_bootstrap(answers, drop, draws), scored)


def _recovery(answers: _Answers, metric: str, drop: Estimate, original: Estimate, *, corrected: bool) -> Measurement:
    """(result - guessed) / (original - guessed), in %; nothing is guessed in the plain one."""
    guessed = answers.columns["chance"] if corrected else np.zeros(answers.count)
    share, chance = original.value, float(guessed.mean())
    # Without a bound (a single cluster) the point itself has to lie above.
    surely = original.one_sided.get(CLEARLY, (share, share))[0]
    if (surely if corrected else share) <= chance:
        than = f"clearly more than guessing ({chance:.1%})" if corrected else "any"
        return _missing(answers, metric, PAIRED, f"the original answers {share:.1%} right, not {than}")
    taken = answers.draws["chance"] if corrected else np.zeros(len(answers.draws["chance"]))
    base = share - chance
    estimate = _ratio(
        answers,
        (answers.total("result") / answers.count - chance) / base,
        answers.draws["result"] - taken,
        answers.draws["original"] - taken,
    )
    if estimate.interval is None:
        note = "the original is too near to guessing, or the items are too few, for an interval of the ratio"
        return _made(answers, metric, PAIRED, estimate.map(_hundred), note)
    least = -np.inf if corrected else 0.0
    return _made(answers, metric, PAIRED, no_narrower(estimate, _relative(drop, base, least)).map(_hundred))


def _ratio(answers: _Answers, value: float, over: FloatArray, under: FloatArray) -> Estimate:
    """A ratio of resampled sums. A draw whose denominator is not positive could be anything: it counts as far below
    for the lower bounds and as far above for the upper ones; a bound that is reached by such draws is none."""
    usable = under > 0
    ratios = np.divide(over, under, out=np.zeros_like(under), where=usable)
    with np.errstate(invalid="ignore"):
        low = _bootstrap(answers, value, np.where(usable, ratios, -np.inf))
        high = _bootstrap(answers, value, np.where(usable, ratios, np.inf))
    interval = None
    if low.interval and high.interval and np.isfinite([low.interval.low, high.interval.high]).all():
        interval = Interval(low.interval.low, high.interval.high, low.interval.level, low.interval.method)
    bounds = {one: (low.one_sided[one][0], high.one_sided[one][1]) for one in low.one_sided}
    return Estimate(value, interval, {one: pair for one, pair in bounds.items() if np.isfinite(pair).all()})


def _relative(drop: Estimate, base: float, least: float) -> Estimate:
    """1 - drop / base: what the drop's interval says of the ratio, the original taken as it was found."""

    def turned(low: float, high: float) -> tuple[float, float]:
        return max(least, 1 - high / base), max(least, 1 - low / base)

    interval = drop.interval
    if interval is not None:
        interval = Interval(*turned(interval.low, interval.high), interval.level, interval.method)
    return Estimate(
        1 - drop.value / base, interval, {level: turned(*bounds) for level, bounds in drop.one_sided.items()}
    )


def _of_choices(
    answers: _Answers, metric: str, subject: str, name: str, limits: tuple[float, float] | None
) -> Measurement:
    """The mean over the items that have choices: in % or points, or in nats where there are no `limits`."""
    asked = answers.columns["choices"] > 0
    count = int(asked.sum())
    if count == 0:
        return _missing(answers, metric, subject, "the items have no choices, so no right one has a probability")
    values = answers.columns[name][asked]
    value = float(values.mean())
    note = None if count == answers.count else f"over the {count} of {answers.count} items that have choices"
    if bool((values == values[0]).all()):
        estimate = Estimate(float(values[0]))
        if limits is None:
            note = "every item has the same value; how much others may have nothing tells"
        elif answers.clusters.fewest > 1:
            estimate = constant_mean(estimate.value, *limits, answers.clusters.count, levels=answers.levels)
    elif bool((answers.draws["choices"] > 0).all()):
        estimate = _bootstrap(answers, value, answers.draws[name] / answers.draws["choices"])
    else:
        estimate = Estimate(value)
    return _made(answers, metric, subject, estimate if limits is None else estimate.map(_hundred), note, count)


def _hundred(share: float) -> float:
    return 100 * share
