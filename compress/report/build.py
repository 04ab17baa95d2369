"""Makes a Report from what a run left: records, measurements, the verdict and the proof."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from compress import __version__
from compress.metrics import METRICS
from compress.plan.serving import Serving
from compress.records import Interval, LayerRecord, Measurement, StepRecord, TaskRecord
from compress.report.remarks import remarks
from compress.report.schema import (
    BoundPart,
    Command,
    FlipPart,
    GatePart,
    Inputs,
    IntervalPart,
    LayerPart,
    MeasurementPart,
    Report,
    Reproduce,
    ServingPart,
    StepPart,
    TaskPart,
    Tool,
    Totals,
    VerdictPart,
)
from compress.verdict import GateResult, Verdict

NOT_FINITE = "the value was not a finite number"


def build_report(
    *,
    verdict: Verdict,
    measurements: Sequence[Measurement],
    steps: Sequence[StepRecord],
    proof: Mapping[str, Any] | None,
    inputs: Inputs,
    output: str,
    format_name: str | None,
    tasks: Sequence[TaskRecord] = (),
    serving: Sequence[Serving] = (),
    command: Command = "run",
    recipe: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    reproduce: Reproduce | None = None,
    created: str | None = None,
) -> Report:
    """The report of one run.

    Args:
        proof: what the proof in a fresh process found, as plain data; None when there was none.
        output: the folder of the result, as the user named it.
        serving: what serving engines make of the folder; empty where nobody looked.
        format_name: the checkpoint format of the result ("compressed-tensors", "gptq", "safetensors"), None where
            it is not known.
        created: ISO 8601 time, or None. The only time in a report.
    """
    parts = tuple(measurement_part(m) for m in measurements)
    return Report(
        tool=Tool(version=__version__),
        command=command,
        created=created,
        verdict=verdict_part(verdict),
        measurements=parts,
        tasks=tuple(task_part(task) for task in tasks),
        remarks=remarks(parts, steps, format_name=format_name, proved=proof is not None, command=command),
        steps=tuple(step_part(step) for step in steps),
        proof=None if proof is None else plain(proof),
        serving=tuple(ServingPart(**asdict(one)) for one in serving),
        inputs=inputs,
        recipe=None if recipe is None else plain(recipe),
        environment=plain(environment or {}),
        output=output,
        reproduce=reproduce or Reproduce(),
    )


def verdict_part(verdict: Verdict) -> VerdictPart:
    return VerdictPart(
        outcome=verdict.outcome.value,
        headline=verdict.headline,
        exit_code=verdict.exit_code,
        gates=tuple(gate_part(result) for result in verdict.gates),
    )


def gate_part(result: GateResult) -> GatePart:
    gate, measurement = result.gate, result.measurement
    bounds = () if measurement is None or gate.level is None else measurement.one_sided.items()
    bound = next((bound_part(level, ends) for level, ends in bounds if math.isclose(level, gate.level or 0)), None)
    return GatePart(
        expression=gate.expression,
        metric=gate.metric,
        task=gate.task,
        outcome=result.outcome.value,
        value=None if measurement is None else finite(measurement.value),
        unit=METRICS[gate.metric].unit,
        threshold=finite(gate.value),
        level=gate.level,
        bound=bound,
        interval=None if measurement is None else interval_part(measurement.interval),
        reason=result.reason,
        line=gate.line,
    )


def measurement_part(measurement: Measurement) -> MeasurementPart:
    metric = METRICS[measurement.metric]
    value = finite(measurement.value)
    lost = value is None and measurement.value is not None
    return MeasurementPart(
        metric=metric.id,
        subject=measurement.subject,
        task=measurement.task,
        value=value,
        unit=metric.unit,
        better=metric.better,
        definition=metric.definition,
        definition_id=metric.definition_id,
        count=measurement.count,
        interval=interval_part(measurement.interval),
        one_sided=tuple(bound_part(level, bound) for level, bound in sorted(measurement.one_sided.items())),
        conditions=plain(measurement.conditions),
        note="; ".join(filter(None, (measurement.note, NOT_FINITE if lost else None))) or None,
    )


def interval_part(interval: Interval | None) -> IntervalPart | None:
    """None also for an interval without finite ends, which says nothing."""
    if interval is None or finite(interval.low) is None or finite(interval.high) is None:
        return None
    return IntervalPart(**asdict(interval))


def bound_part(level: float, bound: tuple[float, float]) -> BoundPart:
    return BoundPart(level=level, lower=finite(bound[0]), upper=finite(bound[1]))


def step_part(step: StepRecord) -> StepPart:
    tokens = step.calibration.get("tokens_used")
    return StepPart(
        kind=step.kind,
        settings=plain(step.settings),
        calibration=plain(step.calibration),
        totals=Totals(
            layers_quantized=step.layers_quantized,
            layers_skipped=step.layers_skipped,
            layers_fallback=step.layers_fallback,
            layers_uncalibrated=step.layers_uncalibrated,
            calibration_tokens=tokens if isinstance(tokens, int) else None,
        ),
        notes=step.notes,
        replaced=dict(step.replaced),
        layers=tuple(layer_part(layer) for layer in step.layers),
    )


def task_part(task: TaskRecord) -> TaskPart:
    flips = tuple(FlipPart(**{name: plain(value) for name, value in asdict(flip).items()}) for flip in task.flips)
    return TaskPart(**(asdict(task) | {"flips": flips}))


def layer_part(layer: LayerRecord) -> LayerPart:
    fields = asdict(layer)
    lost = [name for name in ("damping", "error_before", "error_after") if fields[name] != finite(fields[name])]
    for name in lost:
        fields[name] = None
    fields["smoothing"] = plain(layer.smoothing)
    fields["pruning"] = plain(layer.pruning)
    fields["notes"] = (*layer.notes, *(f"{name} was not a finite number" for name in lost))
    return LayerPart(**fields)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: mappings, lists, strings, numbers; what is not finite becomes None."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    return str(value)
