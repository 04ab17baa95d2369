"""Judges the gates of a report again, from its own measurements: an edited report must not be green for nothing."""

from __future__ import annotations

import math

from compress.errors import UsageError
from compress.recipe.gates import parse_gate
from compress.records import Interval, Measurement
from compress.report.build import NOT_FINITE, gate_part
from compress.report.schema import GatePart, MeasurementPart, Report
from compress.verdict import judge

COMPARED = ("metric", "task", "outcome", "value", "threshold", "level")


def contradictions(report: Report) -> list[str]:
    """What the gates of a report say and its measurements do not, one line each."""
    measurements = [measurement(part) for part in report.measurements]
    stated = (report.recipe or {}).get("gates")
    judged = [part.expression for part in report.verdict.gates]
    if isinstance(stated, list) and judged != stated:
        return [f"its recipe asks for the gates {stated}, and {judged} were judged"]
    return [fault for part in report.verdict.gates for fault in _faults(part, measurements)]


def measurement(part: MeasurementPart) -> Measurement:
    """What the part was made of; an infinite bound was stored as null, a number that was none with a note."""
    lost = part.value is None and NOT_FINITE in (part.note or "")
    interval = part.interval
    return Measurement(
        metric=part.metric,
        subject=part.subject,
        value=math.nan if lost else part.value,
        count=part.count,
        interval=None if interval is None else Interval(interval.low, interval.high, interval.level, interval.method),
        one_sided={
            bound.level: (
                -math.inf if bound.lower is None else bound.lower,
                math.inf if bound.upper is None else bound.upper,
            )
            for bound in part.one_sided
        },
        conditions=part.conditions,
        note=part.note,
        task=part.task,
    )


def _faults(part: GatePart, measurements: list[Measurement]) -> list[str]:
    try:
        gate = parse_gate(part.expression)
    except UsageError as error:
        return [error.message]
    again = gate_part(judge([gate], measurements).gates[0])
    return [
        f"gate `{part.expression}`: {name} is {getattr(part, name)!r}; the report's own measurements give "
        f"{getattr(again, name)!r}"
        for name in COMPARED
        if getattr(part, name) != getattr(again, name)
    ]
