"""What two models answered to the items of tasks: the raw answers, and what a report shows of them item by item."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compress.data.tasks import TaskKind
from compress.power import detectable_drop
from compress.records import FlipRecord, TaskRecord

WORST_FLIPS = 10


@dataclass(frozen=True)
class ItemAnswer:
    """What one model answered to one item.

    Attributes:
        loglikelihoods: of each choice or label, or of the one answer of a cloze; nats. Empty for generated answers.
        probability: of the right choice, softmax over the choices of what decides (see `Scoring.metric`).
        margin: score of the right choice - that of the best wrong one, in the score that decides; above 0 if right.
    """

    correct: bool
    answer: str
    loglikelihoods: tuple[float, ...] = ()
    probability: float | None = None
    margin: float | None = None

    def row(self) -> dict[str, Any]:
        return {
            "correct": self.correct,
            "answer": self.answer,
            "loglikelihoods": list(self.loglikelihoods),
            "probability": self.probability,
            "margin": self.margin,
        }


@dataclass(frozen=True)
class ItemPair:
    """One item and both answers.

    Attributes:
        gold: what is right, as the task file says it; `expected`: the same as text.
        chance: accuracy of guessing this item, 0..1; None where guessing is hopeless or unknown.
    """

    id: str
    question: str
    expected: str
    gold: int | str | tuple[str, ...]
    original: ItemAnswer
    result: ItemAnswer
    cluster: str | None = None
    chance: float | None = None

    @property
    def lost(self) -> bool:
        return self.original.correct and not self.result.correct

    @property
    def gained(self) -> bool:
        return self.result.correct and not self.original.correct


@dataclass(frozen=True)
class TaskPairs:
    """One task that both models answered; at least one item.

    Attributes:
        metric: what counts as right ("acc", "acc_norm", "exact_match", ...).
        sha256: over the items that were asked.
    """

    name: str
    kind: TaskKind
    metric: str
    source: str
    items: tuple[ItemPair, ...]
    sha256: str | None = None

    @property
    def losses(self) -> int:
        return sum(item.lost for item in self.items)

    @property
    def gains(self) -> int:
        return sum(item.gained for item in self.items)

    @property
    def chance(self) -> float | None:
        """Mean over the items, 0..1; None if it is None for any."""
        known = [item.chance for item in self.items if item.chance is not None]
        return sum(known) / len(known) if len(known) == len(self.items) else None

    def rows(self) -> list[dict[str, Any]]:
        """One line of samples.jsonl for each item."""
        return [
            {
                "kind": "task",
                "task": self.name,
                "id": item.id,
                "cluster": item.cluster,
                "gold": list(item.gold) if isinstance(item.gold, tuple) else item.gold,
                "chance": item.chance,
                "original": item.original.row(),
                "result": item.result.row(),
            }
            for item in self.items
        ]


def decided(loglikelihoods: Sequence[float], scores: Sequence[float], right: int, texts: Sequence[str]) -> ItemAnswer:
    """What follows from the log-likelihoods of the options and the scores that decide between them."""
    chosen = max(range(len(scores)), key=lambda index: scores[index])
    weights = [math.exp(score - max(scores)) for score in scores]
    wrong = [one for index, one in enumerate(scores) if index != right]
    return ItemAnswer(
        correct=chosen == right,
        answer=texts[chosen],
        loglikelihoods=tuple(loglikelihoods),
        probability=weights[right] / sum(weights),
        margin=scores[right] - max(wrong),
    )


def task_records(pairs: Sequence[TaskPairs]) -> list[TaskRecord]:
    """What a report says of each task beside its figures, with the worst flips."""
    return [_record(task) for task in pairs]


def _record(task: TaskPairs) -> TaskRecord:
    count = len(task.items)
    drop = detectable_drop(count, (task.losses + task.gains) / count)
    flips = sorted((item for item in task.items if item.lost or item.gained), key=_how_bad)
    return TaskRecord(
        name=task.name,
        kind=task.kind,
        metric=task.metric,
        source=task.source,
        items=count,
        chance=task.chance,
        losses=task.losses,
        gains=task.gains,
        detectable_drop=None if drop is None else 100 * drop,
        sha256=task.sha256,
        flips=tuple(_flip(item) for item in flips[:WORST_FLIPS]),
    )


def _how_bad(item: ItemPair) -> tuple[bool, float]:
    """Losses first, by how far the margin fell, then gains, by how far it rose; a cloze by its log-likelihood."""
    before, after = item.original.margin, item.result.margin
    if before is None and len(item.original.loglikelihoods) == len(item.result.loglikelihoods) == 1:
        before, after = item.original.loglikelihoods[0], item.result.loglikelihoods[0]
    risen = 0.0 if before is None or after is None else after - before
    return not item.lost, risen if item.lost else -risen


def _flip(item: ItemPair) -> FlipRecord:
    return FlipRecord(
        id=item.id,
        question=item.question,
        expected=item.expected,
        original=item.original.answer,
        result=item.result.answer,
        lost=item.lost,
        original_margin=item.original.margin,
        result_margin=item.result.margin,
    )
