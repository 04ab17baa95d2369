"""The report of a run, from what its steps left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import MissingResourceError
from compress.output import REPORT_FOLDER
from compress.pipeline.job import Job
from compress.records import Measurement, StepRecord
from compress.report.build import build_report
from compress.report.environment import environment
from compress.report.loading import loading
from compress.report.markdown import report_markdown
from compress.report.schema import Inputs, ModelPart, Report, Reproduce, report_json
from compress.verdict import Verdict, judge

if TYPE_CHECKING:
    from compress.formats.proof import ProofRecord


def model_part(job: Job) -> ModelPart:
    """The model that went in, with the hash of its config and weights."""
    return ModelPart(
        source=job.recipe.model,
        revision=job.checkpoint.revision,
        content_hash=job.checkpoint.content_hash(),
        model_type=job.checkpoint.model_type,
    )


def bare_report(job: Job, step: StepRecord, proof: ProofRecord) -> Report:
    """What is the same in every run of a recipe: no measurement, no environment, no verdict to speak of."""
    return build_report(
        verdict=judge([], []),
        measurements=[],
        steps=[step],
        proof=asdict(proof),
        inputs=Inputs(model=model_part(job)),
        output=job.plan.output.name,
        format_name=job.plan.format_name,
    )


def full_report(
    job: Job,
    *,
    steps: Sequence[StepRecord],
    proof: ProofRecord,
    texts: Mapping[str, Mapping[str, Any] | None],
    measurements: Sequence[Measurement],
    verdict: Verdict,
    created: str,
    resumed_after: str | None,
) -> Report:
    """The report of the whole run.

    Args:
        texts: facts of the "calibration" and "evaluation" windows, None where there are none.
        resumed_after: the last block that an interrupted run had finished; None for a straight run.
    """
    plan = job.plan
    how = loading(plan.format_name, plan.anatomy.kind, str(plan.output), mixed=plan.mixed)
    return build_report(
        verdict=verdict,
        measurements=measurements,
        steps=steps,
        proof=asdict(proof),
        inputs=Inputs(model=model_part(job), **{name: dict(facts) for name, facts in texts.items() if facts}),
        output=str(plan.output),
        format_name=plan.format_name,
        recipe=plan.recipe.model_dump(mode="json"),
        environment=environment()
        | {"compute_dtype": job.compute_dtype}
        | ({} if resumed_after is None else {"resumed_after": resumed_after}),
        reproduce=Reproduce(command=job.options.command, load=how.transformers),
        created=created,
    )


def write_report_folder(job: Job, report: Report, raw: Mapping[str, Mapping[str, Any]]) -> Path | None:
    """Writes `report/` inside the output: the formats asked for and the raw measurements.

    Returns:
        report.json, or None if the recipe asks for none.
    """
    import io

    import numpy as np

    files: dict[str, bytes] = {}
    if "md" in job.recipe.report:
        files["report.md"] = report_markdown(report).encode()
    for name, values in raw.items():
        if all(isinstance(value, np.ndarray) for value in values.values()):
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **values)
            files[f"{name}.npz"] = buffer.getvalue()
        else:
            files[f"{name}.json"] = json.dumps(values, indent=1).encode()
    if "json" in job.recipe.report:
        files["report.json"] = report_json(report).encode()
    folder = job.plan.output / REPORT_FOLDER
    for name, data in files.items():
        _write(folder / name, data)
    return folder / "report.json" if "report.json" in files else None


def _write(path: Path, data: bytes) -> None:
    """Writes one file whole or not at all.

    Raises:
        MissingResourceError: it cannot be written; says that the checkpoint itself is complete.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise MissingResourceError(
            f"{path}: {error.strerror} ({len(data):,} bytes); the report is not complete.",
            hint=f"The checkpoint in {path.parents[1]} is complete. Make room, then run again with --overwrite.",
        ) from error
