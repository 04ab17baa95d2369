"""The steps of a recipe, one after the other: each starts from the folder that the one before wrote and proved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.errors import BrokenResultError, UsageError
from compress.journal import Journal
from compress.model.finite import check_finite
from compress.output import Workspace
from compress.pipeline.build import finish, quantize, quantize_step
from compress.pipeline.fallback import check_fallback
from compress.pipeline.job import Job
from compress.pipeline.pruning import Pruned, prune
from compress.pipeline.ready import check_model
from compress.pipeline.resuming import open_journal
from compress.records import StepRecord

if TYPE_CHECKING:
    from compress.data.windows import Windows
    from compress.formats.proof import ProofRecord


@dataclass(frozen=True)
class Done:
    """Attributes:
    job: of the last step.
    proof: of the folder in `workspace.stage`.
    journal: of the last step.
    resumed_after: the last part that an interrupted run had finished; None for a straight run.
    """

    job: Job
    records: tuple[StepRecord, ...]
    proof: ProofRecord
    journal: Journal
    resumed_after: str | None


def take_steps(job: Job, workspace: Workspace, fitting: Windows | None, held_out: Windows | None) -> Done:
    """All steps; what they made is in `workspace.stage`, proved.

    Args:
        fitting, held_out: calibration and evaluation text; None where there is none.
    """
    pruned = None if job.plan.pruned is None else prune(job, workspace, fitting, held_out)
    if pruned is None or job.plan.quantizes:
        return _quantized(job, workspace, fitting, held_out, pruned)
    workspace.stage.rmdir()
    workspace.pruned.rename(workspace.stage)
    return Done(pruned.job, (pruned.step,), pruned.proof, pruned.journal, pruned.resumed_after)


def _quantized(
    job: Job, workspace: Workspace, fitting: Windows | None, held_out: Windows | None, pruned: Pruned | None
) -> Done:
    before: tuple[StepRecord, ...] = ()
    resumed_after = None
    if pruned is not None:
        job, before, resumed_after = pruned.job, (pruned.step,), pruned.resumed_after
        check_model(job)
        if job.plan.halved:
            check_finite(job.checkpoint, job.progress, halved=job.plan.halved)
    windows = fitting if job.plan.fits_codes else None
    journal = open_journal(job, workspace, windows)
    resumed_after = journal.parts[-1] if journal.parts else resumed_after
    with journal.worthless_after(UsageError, BrokenResultError):
        step = quantize(job, journal, windows)
    check_fallback(step, quantize_step(job.plan).max_fallback)  # who allows more of them can go on from here
    with journal.worthless_after(UsageError, BrokenResultError):
        proof = finish(job, workspace, journal, step, held_out)
    return Done(job, (*before, step), proof, journal, resumed_after)
