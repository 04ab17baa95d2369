"""plan -> texts -> prune -> quantize -> write -> prove -> compare -> publish -> time -> judge -> report.

Everything that can be refused is refused before a weight is loaded. Nothing gets the output's name before it is
proved and its answers are compared with the original's; whatever happens while it is timed, its report is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compress.errors import BrokenResultError
from compress.model.checkpoint import Checkpoint
from compress.model.finite import check_finite
from compress.model.hub import resolve
from compress.output import REPORT_FOLDER, check_output
from compress.pipeline.job import Job, Options, check_resources, on_dense_weights, open_job
from compress.pipeline.pair import Pair
from compress.pipeline.ready import check_model, check_packages
from compress.pipeline.texts import calibration_windows, evaluation_windows, read_texts
from compress.plan.estimate import Estimate, estimate
from compress.plan.machine import machine
from compress.plan.planning import Plan, make_plan
from compress.progress import Progress
from compress.recipe.schema import Recipe
from compress.report.schema import Report
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


def plan_recipe(recipe: Recipe, memory: int | None = None) -> tuple[Plan, Estimate]:
    """What `recipe` would do, from config and headers only; a hub model's weights are not downloaded.

    Args:
        memory: bytes that models and activations may take, see `Options`.
    """
    plan = make_plan(recipe, resolve(recipe.model, weights=False))
    return plan, estimate(plan, machine().limited(memory))


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
    check_resources(plan, here, options.memory)
    with opened(plan.output, source, overwrite=options.overwrite, resume=options.resume, say=progress.say) as workspace:
        from compress.model.checkpoint import open_checkpoint
        from compress.pipeline.answers import check_tasks, compare_answers
        from compress.pipeline.describing import describe, sizes
        from compress.pipeline.measured import Measured, measured
        from compress.pipeline.reporting import run_report
        from compress.pipeline.steps import take_steps
        from compress.pipeline.timed import timed_report
        from compress.pipeline.timing import left_out, not_timed, why_not_timed

        check_packages(plan)
        job = on_dense_weights(open_job(plan, options, here, progress), workspace.dense)
        check_model(job)
        pair = pair_of(job, None)
        foreign = check_tasks(pair)
        fitting, held_out = calibration_windows(job, calibration), evaluation_windows(pair, evaluation)
        # It reads all weights, so texts and tokenizer come first.
        check_finite(job.plan.original, progress, halved=frozenset() if plan.pruned else plan.halved)
        done = take_steps(job, workspace, fitting, held_out)
        job = done.job
        with done.journal.worthless_after(BrokenResultError):
            answers = compare_answers(pair_of(job, open_checkpoint(workspace.stage)), held_out, foreign)
        describe(job, workspace, done.records, done.proof, answers, held_out)
        publish(workspace)
        pair = pair_of(job, open_checkpoint(plan.output))
        counted = [*sizes(job, open_checkpoint(plan.output)), *left_out(pair)]

        def report_on(found: Measured) -> Report:
            texts = {"calibration": fitting, "evaluation": held_out}
            return run_report(done, texts=texts, measured=found)

        folder = plan.output / REPORT_FOLDER
        report, file = timed_report(
            pair,
            folder,
            report_on,
            lambda timed: measured(counted, answers, timed),
            lambda error: measured([*counted, *not_timed(pair, error)], answers, None, why_not_timed(error)),
        )
        return Result(report, file, plan.output)


def pair_of(job: Job, result: Checkpoint | None) -> Pair:
    """The model of the job beside its result."""
    return Pair(
        original=job.plan.original,
        result=result,
        kind=job.plan.anatomy.kind,
        parameters=job.plan.original_parameters,
        asked=job.recipe,
        tasks=job.plan.tasks,
        device=job.device,
        trust_remote_code=job.options.trust_remote_code,
        progress=job.progress,
        ours=True,
        cast=job.plan.cast,
    )
