"""plan -> texts -> quantize -> write -> prove -> publish -> measure -> judge -> report.

Everything that can be refused is refused before a weight is loaded; nothing gets the output's name before it is
proved.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from compress.model.finite import check_finite
from compress.model.hub import resolve
from compress.pipeline.job import Options, check_resources, open_job
from compress.pipeline.texts import calibration_windows, evaluation_windows, read_texts
from compress.plan.estimate import Estimate, estimate
from compress.plan.machine import machine
from compress.plan.planning import Plan, make_plan
from compress.progress import Progress
from compress.recipe.schema import Recipe
from compress.report.schema import Report
from compress.verdict import judge
from compress.workspace import check_output, opened


@dataclass(frozen=True)
class Result:
    """Attributes:
    report_file: report.json, or None if the recipe asks for none.
    output: the published folder.
    """

    report: Report
    report_file: Path | None
    output: Path


def plan_recipe(recipe: Recipe) -> tuple[Plan, Estimate]:
    """What `recipe` would do, from config and headers only; a hub model's weights are not downloaded."""
    plan = make_plan(recipe, resolve(recipe.model, weights=False))
    return plan, estimate(plan, machine())


def run(recipe: Recipe, options: Options, progress: Progress) -> Result:
    """Runs a recipe from end to end.

    Raises:
        CompressError: see `compress.errors`; a gate that fails is no error but the report's verdict.
    """
    here = machine()
    headers = resolve(recipe.model, weights=False)
    plan = make_plan(recipe, headers)
    check_output(plan.output, headers.folder if headers.has_weights else None, overwrite=options.overwrite)
    calibration, evaluation = read_texts(plan)
    check_resources(plan, here)
    with opened(plan.output) as workspace:
        from compress.pipeline.build import build
        from compress.pipeline.measuring import measure
        from compress.pipeline.reporting import full_report, write_report_folder

        job = open_job(plan, options, here, progress)
        check_finite(job.checkpoint, progress)
        fitting, held_out = calibration_windows(job, calibration), evaluation_windows(job, evaluation)
        built = build(job, workspace, fitting, held_out)
        measurements, raw = measure(job, built.checkpoint, held_out)
        report = full_report(
            job,
            steps=built.steps,
            proof=built.proof,
            texts={
                "calibration": None if fitting is None else fitting.facts(),
                "evaluation": None if held_out is None else held_out.facts(),
            },
            measurements=measurements,
            verdict=judge(recipe.gates, measurements),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return Result(report, write_report_folder(job, report, raw), plan.output)
