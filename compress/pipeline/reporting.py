"""The report of a run, from what its steps left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.pipeline.job import Job
from compress.records import Measurement, StepRecord
from compress.report.build import build_report
from compress.report.environment import environment
from compress.report.loading import loading
from compress.report.markdown import report_markdown
from compress.report.schema import Inputs, ModelPart, Report, Reproduce, write_report
from compress.verdict import Verdict, judge
from compress.workspace import REPORT_FOLDER

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
) -> Report:
    """The report of the whole run.

    Args:
        texts: facts of the "calibration" and "evaluation" windows, None where there are none.
    """
    plan = job.plan
    how = loading(plan.format_name, plan.anatomy.kind, str(plan.output))
    return build_report(
        verdict=verdict,
        measurements=measurements,
        steps=steps,
        proof=asdict(proof),
        inputs=Inputs(model=model_part(job), **{name: dict(facts) for name, facts in texts.items() if facts}),
        output=str(plan.output),
        format_name=plan.format_name,
        recipe=plan.recipe.model_dump(mode="json"),
        environment=environment() | {"compute_dtype": job.compute_dtype},
        reproduce=Reproduce(command=job.options.command, load=how.transformers),
        created=created,
    )


def write_report_folder(job: Job, report: Report, raw: Mapping[str, Mapping[str, Any]]) -> Path | None:
    """Writes `report/` inside the output: the formats asked for and the raw measurements.

    Returns:
        report.json, or None if the recipe asks for none.
    """
    import json

    import numpy as np

    folder = job.plan.output / REPORT_FOLDER
    folder.mkdir(exist_ok=True)
    if "md" in job.recipe.report:
        (folder / "report.md").write_text(report_markdown(report), encoding="utf-8")
    for name, values in raw.items():
        if all(isinstance(value, np.ndarray) for value in values.values()):
            np.savez_compressed(folder / f"{name}.npz", **values)
        else:
            (folder / f"{name}.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    if "json" not in job.recipe.report:
        return None
    path = folder / "report.json"
    write_report(report, path)
    return path
