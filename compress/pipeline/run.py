"""plan -> texts -> quantize -> write -> prove -> compare -> publish -> time -> judge -> report.

Everything that can be refused is refused before a weight is loaded. Nothing gets the output's name before it is
proved and its answers are compared with the original's; whatever happens while it is timed, its report is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compress.errors import BrokenResultError, CompressError, UsageError
from compress.model.finite import check_finite
from compress.model.hub import resolve
from compress.output import check_output
from compress.pipeline.fallback import check_fallback
from compress.pipeline.job import Job, Options, check_resources, open_job
from compress.pipeline.texts import calibration_windows, evaluation_windows, read_texts
from compress.plan.estimate import Estimate, estimate
from compress.plan.machine import machine
from compress.plan.planning import Plan, make_plan
from compress.progress import Progress
from compress.recipe.schema import Recipe
from compress.records import Measurement
from compress.report.schema import Report
from compress.verdict import judge
from compress.workspace import opened, publish


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
    source = headers.folder if headers.has_weights else None
    check_output(plan.output, source, overwrite=options.overwrite)
    calibration, evaluation = read_texts(plan)
    check_resources(plan, here)
    with opened(plan.output, source, overwrite=options.overwrite, resume=options.resume, say=progress.say) as workspace:
        from compress.model.checkpoint import open_checkpoint
        from compress.model.fit import check_fit
        from compress.pipeline.build import finish, quantize
        from compress.pipeline.measuring import fidelity, sizes
        from compress.pipeline.reporting import full_report
        from compress.pipeline.resuming import open_journal

        job = open_job(plan, options, here, progress)
        check_fit(job.checkpoint, trust_remote_code=options.trust_remote_code)
        check_finite(job.checkpoint, progress)
        fitting, held_out = calibration_windows(job, calibration), evaluation_windows(job, evaluation)
        journal = open_journal(job, workspace, fitting)
        resumed_after = journal.parts[-1] if journal.parts else None
        with journal.worthless_after(UsageError, BrokenResultError):
            step = quantize(job, journal, fitting)
        check_fallback(step, recipe.steps[0].quantize.max_fallback)  # who allows more of them can go on from here
        with journal.worthless_after(UsageError, BrokenResultError):
            proof = finish(job, workspace, journal, step, held_out)
            measurements, raw = fidelity(job, open_checkpoint(workspace.stage), held_out)
        publish(workspace)
        measurements = sizes(job, open_checkpoint(plan.output)) + measurements
        texts = {"calibration": fitting, "evaluation": held_out}
        facts = {name: None if text is None else text.facts() for name, text in texts.items()}

        def report_on(measured: list[Measurement]) -> Report:
            return full_report(
                job,
                steps=[step],
                proof=proof,
                texts=facts,
                measurements=measured,
                verdict=judge(recipe.gates, measured),
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                resumed_after=resumed_after,
            )

        return _timed(job, report_on, measurements, raw)


def _timed(
    job: Job,
    report_on: Callable[[list[Measurement]], Report],
    measurements: list[Measurement],
    raw: dict[str, Any],
) -> Result:
    """Times the published folder and writes its report, whatever happens meanwhile."""
    from compress.model.checkpoint import open_checkpoint
    from compress.pipeline.measuring import latency, not_timed
    from compress.pipeline.reporting import write_report_folder

    if job.recipe.bench is not None:  # what is left if the benchmark is killed
        killed = measurements + not_timed(job, CompressError("the run was killed"))
        write_report_folder(job, report_on(killed), raw)
    interruption: BaseException | None = None
    try:
        timed, samples = latency(job, open_checkpoint(job.plan.output))
        measurements, raw = measurements + timed, raw | samples
    except (CompressError, KeyboardInterrupt) as error:
        measurements, interruption = measurements + not_timed(job, error), error
    report = report_on(measurements)
    report_file = write_report_folder(job, report, raw)
    if interruption is not None:
        raise interruption
    return Result(report, report_file, job.plan.output)
