"""The step `prune`: choose, walk, write, prove; the folder that it leaves is what the next step starts from.

What is chosen for the whole model (the shape, the layers that go, gradients) are parts of the step's journal in front
of its blocks. A run that is resumed later writes the same folder from it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from compress.durable import write_tensors
from compress.errors import BrokenResultError, UsageError
from compress.journal import AHEAD, Journal, Resumed
from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.dtypes import dtype_note
from compress.model.kept import kept_of
from compress.model.pruned import source_name
from compress.model.shapes import Kept
from compress.output import Workspace
from compress.pipeline.build import dequantized_note
from compress.pipeline.choices import Choice, choose
from compress.pipeline.job import Job
from compress.pipeline.proving import BLOCK_PROOF_LENGTH, BLOCK_PROOF_WINDOWS, answers, named_cases, proof_ids
from compress.pipeline.resuming import open_pruning_journal
from compress.plan.planning import on_shape
from compress.plan.pruning import PrunePlan, with_shape
from compress.records import LayerRecord, StepRecord

if TYPE_CHECKING:
    import torch

    from compress.data.windows import Windows
    from compress.formats.proof import ProofJob, ProofRecord
    from compress.prune.settings import PruneSettings


@dataclass(frozen=True)
class Pruned:
    """Attributes:
    job: starts from the pruned folder, which is `workspace.pruned`.
    resumed_after: the last part that an interrupted run had finished; None if there was none.
    """

    job: Job
    step: StepRecord
    proof: ProofRecord
    journal: Journal
    resumed_after: str | None


def prune(job: Job, workspace: Workspace, windows: Windows | None, held_out: Windows | None) -> Pruned:
    """Makes the pruned folder in `workspace.pruned`, or what of it is not in the journal yet, and proves it.

    Args:
        windows: calibration text; None where none is used.
        held_out: evaluation text, of which the proof takes a few windows.

    Raises:
        BrokenResultError: numbers that are not finite, or a folder that fails its proof.
        MissingResourceError: the disk is full.
    """
    planned = job.plan.pruned
    assert planned is not None
    ids = windows.ids if windows is not None and planned.calibrates else ()
    _check_tokens(planned, ids)
    journal = open_pruning_journal(job, workspace, windows if ids else None)
    resumed_after = journal.parts[-1] if journal.parts else None
    with journal.worthless_after(UsageError, BrokenResultError):
        settings = _settings(job, journal)
        choice = choose(job, journal, settings, ids)
        records = _walk(job, journal, choice, settings, ids)
        job = _decided(job, choice)
        hashes = _hashes(journal)
        proof = _finish(
            job, workspace, journal, choice, kept_of(records, planned.anatomy.blocks, planned.before), hashes, held_out
        )
    calibration = windows.facts() if windows is not None and ids else {}
    step = _record(job, choice, records, hashes, calibration, proof)
    return Pruned(_on_pruned_folder(job, workspace), step, proof, journal, resumed_after)


def _check_tokens(planned: PrunePlan, ids: Sequence[torch.Tensor]) -> None:
    """Raises UsageError where the text is too little, before any time is spent on it."""
    from compress.prune.settings import PruneSettings
    from compress.prune.walk import check_tokens

    if ids and (planned.step.compensate or planned.step.importance == "obs"):
        check_tokens(planned.anatomy, planned.before, planned.after, ids, PruneSettings.held_out)


def _settings(job: Job, journal: Journal) -> PruneSettings:
    import torch

    from compress.prune.settings import PruneSettings

    planned = job.plan.pruned
    assert planned is not None
    return PruneSettings(
        planned.step.importance,
        planned.step.compensate,
        getattr(torch, job.compute_dtype),
        job.device,
        seed=job.recipe.seed,
        batch_size=job.recipe.calibration.batch_size,
        one_pass=job.one_pass,
        spill=journal.scratch if job.spill else None,
    )


def _walk(
    job: Job, journal: Journal, choice: Choice, settings: PruneSettings, ids: Sequence[torch.Tensor]
) -> list[LayerRecord]:
    from compress.prune.walk import prune_blocks

    planned = job.plan.pruned
    assert planned is not None
    return prune_blocks(
        planned.source,
        planned.anatomy,
        before=planned.before,
        after=choice.shape,
        kept_layers=choice.layers,
        settings=settings,
        windows=ids,
        gradients=choice.gradients,
        save=journal.save,
        progress=job.progress,
        resumed=_blocks(journal),
    )


def _blocks(journal: Journal) -> Resumed | None:
    """What the journal has of the walk."""
    found = journal.resumed()
    parts = () if found is None else tuple(name for name in found.parts if not name.startswith(AHEAD))
    return None if found is None or not parts else replace(found, parts=parts, replaced=_changed(journal))


def _changed(journal: Journal) -> Mapping[str, torch.Tensor]:
    """Tensors that differ from the source's, by their names there."""
    return journal.replaced(of=lambda part: not part.startswith(AHEAD))


def _decided(job: Job, choice: Choice) -> Job:
    """The job with the shape that was found, and with the layers that stay."""
    assert job.plan.pruned is not None
    return replace(job, plan=on_shape(job.plan, with_shape(job.plan.pruned, (choice.shape,), choice.layers)))


def _finish(
    job: Job,
    workspace: Workspace,
    journal: Journal,
    choice: Choice,
    kept: Sequence[Kept],
    hashes: Mapping[str, str],
    held_out: Windows | None,
) -> ProofRecord:
    """Writes the pruned folder and proves it."""
    from compress.formats.proof import prove
    from compress.formats.pruned import write_pruned

    planned = job.plan.pruned
    assert planned is not None
    write_pruned(
        planned.source,
        planned.anatomy,
        workspace.pruned,
        config=planned.checkpoint.config,
        shards=planned.shards,
        kept_layers=choice.layers,
        replaced=_changed(journal),
        trust_remote_code=job.options.trust_remote_code,
        progress=job.progress,
    )
    with job.progress.phase("Proving the pruned model", 2) as advance:
        asked = _proof_job(job, workspace, journal, kept, hashes, held_out)
        advance(1)
        record = prove(asked)
        advance(1)
    return record


def _proof_job(
    job: Job,
    workspace: Workspace,
    journal: Journal,
    kept: Sequence[Kept],
    hashes: Mapping[str, str],
    held_out: Windows | None,
) -> ProofJob:
    from compress.formats.proof import ProofJob

    planned, trusted = job.plan.pruned, job.options.trust_remote_code
    assert planned is not None
    layers, logits = [one.block for one in kept], workspace.partial / "logits.safetensors"
    names = {name: source_name(planned.anatomy, name, layers) for name in planned.checkpoint.tensors}
    write_tensors(logits, _cases(job, planned, journal, kept, held_out))
    return ProofJob(
        workspace.pruned,
        planned=planned.shards,
        weight_sha256={},
        logits=logits,
        kind=planned.anatomy.kind,
        loader="stock",
        trust_remote_code=trusted,
        source=planned.source.folder,
        replaced_sha256={name: hashes[before] for name, before in names.items() if before in hashes},
        config=planned.checkpoint.config,
        names=names,
        by_block=not job.whole,
    )


def _cases(
    job: Job, planned: PrunePlan, journal: Journal, kept: Sequence[Kept], held_out: Windows | None
) -> dict[str, torch.Tensor]:
    """What the full-size model with zeros in the place of removed units answers to the proof's windows."""
    from compress.formats.pruned import full_size, full_size_outputs

    changed, windows = _changed(journal), proof_ids(job, held_out)
    if not job.whole:
        few = [ids[:BLOCK_PROOF_LENGTH] for ids in windows[:BLOCK_PROOF_WINDOWS]]
        found = full_size_outputs(planned.source, planned.anatomy, few, kept=kept, replaced=changed)
        return named_cases(few, found)
    trusted = job.options.trust_remote_code
    model = full_size(planned.source, planned.anatomy, kept=kept, replaced=changed, trust_remote_code=trusted)
    return named_cases(windows, answers(model, windows, planned.anatomy.kind))


def _hashes(journal: Journal) -> dict[str, str]:
    """{name in the source: hash of the bytes} of every tensor that differs."""
    from compress.formats.proof import stored_sha256

    return {name: stored_sha256(tensor) for name, tensor in _changed(journal).items()}


def _record(
    job: Job,
    choice: Choice,
    records: Sequence[LayerRecord],
    hashes: Mapping[str, str],
    calibration: Mapping[str, Any],
    proof: ProofRecord,
) -> StepRecord:
    planned = job.plan.pruned
    assert planned is not None
    proved = f"the pruned model was proved by {proof.method}: {', '.join(check.name for check in proof.checks)}"
    told = (*planned.notes, *choice.notes, dtype_note(planned.source), dequantized_note(planned.source), proved)
    notes = tuple(note for note in told if note is not None)
    return StepRecord("prune", _used(planned, choice), tuple(records), calibration, notes, hashes)


def _used(planned: PrunePlan, choice: Choice) -> dict[str, Any]:
    """What was asked for, and what came of it."""
    step = planned.step
    used: dict[str, Any] = {
        "keep": step.keep.named,
        "params": step.params,
        "size": step.size,
        "importance": step.importance,
        "compensate": step.compensate,
        "before": asdict(planned.before),
        "after": asdict(choice.shape),
        "layers_kept": list(choice.layers),
    }
    return {name: value for name, value in {**used, **choice.facts}.items() if value not in (None, {})}


def _on_pruned_folder(job: Job, workspace: Workspace) -> Job:
    """The job on the folder that was written."""
    plan = job.plan
    real = replace(open_checkpoint(workspace.pruned, plan.original.source), revision=plan.original.revision)
    return replace(job, plan=replace(plan, checkpoint=real, anatomy=anatomy(real)))
