"""Everything that was measured in a run, beside the raw values it can be recomputed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.pipeline.answers import Answers
from compress.records import Measurement, TaskRecord

if TYPE_CHECKING:
    from compress.measure.latency.measuring import Timed


@dataclass(frozen=True)
class Measured:
    """Attributes:
    raw: {file name in the report folder: its lines}.
    noise: why the machine did not give the precision that was asked of it.
    unfinished: what did not come to its end, and why.
    contention: what else the machine did while it was timed.
    """

    measurements: tuple[Measurement, ...]
    tasks: tuple[TaskRecord, ...] = ()
    raw: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    noise: str | None = None
    unfinished: str | None = None
    contention: Mapping[str, Any] = field(default_factory=dict)


def measured(
    counted: Sequence[Measurement], answers: Answers, timed: Timed | None, unfinished: str | None = None
) -> Measured:
    """All of it together.

    Args:
        counted: sizes, and what else is not estimated.
        unfinished: why there are no times, although they were asked for.
    """
    raw: dict[str, Sequence[Mapping[str, Any]]] = {"samples.jsonl": answers.rows}
    if timed is None:
        return Measured((*counted, *answers.measurements), answers.tasks, raw, unfinished=unfinished)
    raw["latency.jsonl"] = timed.raw.rows()
    every = (*counted, *answers.measurements, *timed.measurements)
    return Measured(every, answers.tasks, raw, timed.noise, contention=timed.contention)
