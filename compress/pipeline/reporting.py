"""The report of a run, from what its steps left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from compress.errors import MissingResourceError
from compress.model.checkpoint import Checkpoint
from compress.output import REPORT_FILES
from compress.pipeline.job import Job
from compress.pipeline.measured import Measured
from compress.pipeline.pair import Pair
from compress.pipeline.serving import planned_serving, saved_serving
from compress.recipe.comparison import Comparison
from compress.records import Measurement, StepRecord, TaskRecord
from compress.report.build import build_report
from compress.report.environment import environment
from compress.report.loading import loading
from compress.report.render import FORMATS, render_files
from compress.report.schema import Inputs, ModelPart, Report, Reproduce
from compress.verdict import judge

if TYPE_CHECKING:
    from compress.data.windows import Windows
    from compress.formats.proof import ProofRecord
    from compress.pipeline.steps import Done


def model_part(checkpoint: Checkpoint, source: str) -> ModelPart:
    """A model that went in, with the hash of its config and weights."""
    return ModelPart(
        source=source,
        revision=checkpoint.revision,
        content_hash=checkpoint.content_hash,
        model_type=checkpoint.model_type,
    )


def bare_report(
    job: Job,
    steps: Sequence[StepRecord],
    proof: ProofRecord,
    measurements: Sequence[Measurement],
    tasks: Sequence[TaskRecord],
    held_out: Windows | None,
) -> Report:
    """What is the same in every run of a recipe: no time, no environment, no verdict to speak of."""
    return build_report(
        verdict=judge([], []),
        measurements=measurements,
        tasks=tasks,
        steps=steps,
        proof=asdict(proof),
        inputs=Inputs(
            model=model_part(job.plan.original, job.recipe.model),
            # The card is published: what a text is called there, not where it lies here.
            evaluation=None if held_out is None else held_out.facts() | {"source": Path(held_out.source).name},
        ),
        output=job.plan.output.name,
        format_name=job.plan.format_name,
        serving=planned_serving(job.plan),
    )


def run_report(done: Done, *, texts: Mapping[str, Windows | None], measured: Measured) -> Report:
    """The report of a whole run.

    Args:
        texts: the "calibration" and "evaluation" windows, None where there are none.
    """
    job, plan = done.job, done.job.plan
    engines = saved_serving(plan, plan.output)
    how = loading(
        plan.format_name,
        plan.anatomy.kind,
        str(plan.output),
        mixed=plan.mixed,
        zero_points=plan.zero_points,
        experts=plan.anatomy.has_experts,
        architecture=plan.class_name,
        served=all(engine.loads for engine in engines),
    )
    facts: dict[str, Any] = {name: windows.facts() for name, windows in texts.items() if windows is not None}
    return build_report(
        verdict=judge(job.recipe.gates, measured.measurements, measured.noise, unfinished=measured.unfinished),
        measurements=measured.measurements,
        tasks=measured.tasks,
        steps=done.records,
        proof=asdict(done.proof),
        inputs=Inputs(model=model_part(plan.original, job.recipe.model), **facts),
        output=str(plan.output),
        format_name=plan.format_name,
        recipe=plan.recipe.model_dump(mode="json"),
        serving=engines,
        environment=_environment(measured)
        | {"compute_dtype": job.compute_dtype}
        | ({} if done.resumed_after is None else {"resumed_after": done.resumed_after}),
        reproduce=Reproduce(command=job.options.command, load=how.transformers),
        created=_now(),
    )


def comparison_report(
    pair: Pair, *, command: Literal["eval", "bench"], evaluation: Windows | None, measured: Measured, typed: str | None
) -> Report:
    """The report of `compress eval` and `compress bench`."""
    asked = pair.asked
    assert isinstance(asked, Comparison)
    result = None if pair.result is None or asked.result is None else model_part(pair.result, asked.result)
    return build_report(
        verdict=judge(asked.gates, measured.measurements, measured.noise, unfinished=measured.unfinished),
        measurements=measured.measurements,
        tasks=measured.tasks,
        steps=[],
        proof=None,
        inputs=Inputs(
            model=model_part(pair.original, asked.original),
            result=result,
            evaluation=None if evaluation is None else evaluation.facts(),
        ),
        output=asked.result or asked.original,
        format_name=None,
        command=command,
        recipe=asked.model_dump(mode="json"),
        environment=_environment(measured),
        reproduce=Reproduce(command=typed),
        created=_now(),
    )


def _environment(measured: Measured) -> dict[str, Any]:
    return environment() | ({"contention": dict(measured.contention)} if measured.contention else {})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_report_folder(folder: Path, report: Report, formats: Sequence[str], measured: Measured) -> Path | None:
    """Writes the formats asked for, metrics.json and the raw measurements.

    Returns:
        report.json, or None if it is not asked for.
    """
    files = {name: _lines(rows) for name, rows in measured.raw.items() if rows}
    files |= render_files(report, formats)
    complete = FORMATS["json"].file  # comes last: where it is, everything else is there
    for name in sorted(files, key=lambda name: name == complete):
        _write(folder / name, files[name])
    for stale in REPORT_FILES - files.keys():
        (folder / stale).unlink(missing_ok=True)
    return folder / complete if "json" in formats else None


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows).encode()


def _write(path: Path, data: bytes) -> None:
    """Writes one file whole or not at all.

    Raises:
        MissingResourceError: it cannot be written; says that the checkpoint itself is complete.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise MissingResourceError(
            f"{path}: {error.strerror} ({len(data):,} bytes); the report is not complete.",
            hint="Models are not touched by this: a checkpoint that was written is complete. Make room and run again.",
        ) from error
