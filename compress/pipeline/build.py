"""Quantize, write, prove: from an accepted plan to a complete folder on the stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.errors import UsageError
from compress.formats.bitsandbytes_layout import cpu_note
from compress.formats.quantized_source import method_of, quantization
from compress.journal import Journal
from compress.model.anatomy import is_weight
from compress.model.checkpoint import Checkpoint
from compress.model.dtypes import dtype_note
from compress.output import Workspace
from compress.pipeline.job import Job
from compress.pipeline.proving import block_proof_job, proof_job
from compress.plan.found import class_note, found_note, unmeasured_note
from compress.plan.planning import Plan
from compress.recipe.quantize import Quantize
from compress.records import LayerRecord, StepRecord
from compress.scheme import TARGETS

if TYPE_CHECKING:
    from compress.data.windows import Windows
    from compress.formats.proof import ProofRecord
    from compress.quantize.layer import LayerPlan


def finish(
    job: Job, workspace: Workspace, journal: Journal, step: StepRecord, evaluation: Windows | None
) -> ProofRecord:
    """Writes and proves what is quantized, in `workspace.stage`."""
    from compress.formats.proof import prove

    write(job, workspace, journal)
    with job.progress.phase("Proving the checkpoint", 2) as advance:
        if job.whole:
            asked = proof_job(job, workspace, step, evaluation)
        else:
            asked = block_proof_job(job, workspace, journal, step, evaluation)
        advance(1)
        record = prove(asked)
        advance(1)
    return record


def write(job: Job, workspace: Workspace, journal: Journal) -> None:
    """The checkpoint in `workspace.stage`."""
    from compress.formats.write import write_checkpoint

    plan = job.plan
    write_checkpoint(
        job.checkpoint,
        workspace.stage,
        format_name=plan.format_name,
        layers=plan.anatomy.layers,
        schemes=plan.schemes,
        quantized=journal.load,
        cast=plan.cast,
        max_shard_size=quantize_step(plan).max_shard_size,
        trust_remote_code=job.options.trust_remote_code,
        progress=job.progress,
        replaced=journal.replaced(),
        left_out=plan.anatomy.second_names,
    )


def quantize(job: Job, journal: Journal, windows: Windows | None) -> StepRecord:
    """Quantizes what is not in the journal yet."""
    import torch

    from compress.formats.proof import stored_sha256
    from compress.quantize.block import WalkSettings
    from compress.quantize.gptq import GptqSettings
    from compress.quantize.refine import RefineSettings
    from compress.quantize.walk import quantize_blocks, quantize_nearest_all

    plan, step, layers = job.plan, quantize_step(job.plan), _layer_plans(job)
    _check_held_out(step.refine, windows)
    records: list[LayerRecord] = []
    if layers and windows is not None:
        settings = WalkSettings(
            GptqSettings(damping=step.damping, **step.gptq.model_dump()),
            job.recipe.calibration.batch_size,
            getattr(torch, job.compute_dtype),
            job.device,
            one_pass=job.one_pass,
            spill=journal.scratch if job.spill else None,
            fold_biases=step.smooth is True,
            refine=RefineSettings(step.refine, job.recipe.seed),
        )
        records = quantize_blocks(
            job.checkpoint, plan.anatomy, layers, windows.ids, settings, journal.save, job.progress, journal.resumed()
        )
    elif layers:
        records = quantize_nearest_all(
            job.checkpoint, layers, journal.save, job.progress, job.device, journal.resumed()
        )
    calibration = windows.facts() if windows is not None else {}
    layers_done = (*records, *_left_alone(plan))
    replaced = {name: stored_sha256(tensor) for name, tensor in journal.replaced().items()}
    return StepRecord("quantize", _settings_used(plan), layers_done, calibration, _notes(plan), replaced)


def quantize_step(plan: Plan) -> Quantize:
    """The step of a plan that quantizes."""
    assert plan.recipe.quantize is not None
    return plan.recipe.quantize


def _check_held_out(refine: int, windows: Windows | None) -> None:
    if refine and windows is not None and len(windows.ids) < 2:
        raise UsageError(
            "refine needs at least 2 windows of calibration text, one to learn from and one that decides whether what "
            f"was learnt is kept; there is {len(windows.ids)}.",
            hint="More --samples or more text, or leave --refine out.",
        )


def _layer_plans(job: Job) -> list[LayerPlan]:
    import torch

    from compress.quantize.layer import LayerPlan

    plan, step = job.plan, quantize_step(job.plan)
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    return [
        LayerPlan(
            planned.layer,
            planned.scheme,
            planned.target,
            plan.algorithm if plan.algorithm in TARGETS[planned.target].algorithms else "rtn",
            dtypes[plan.scale_dtypes[planned.layer.name]],
            step.smooths(planned.scheme.activation_bits, planned.scheme.values),
        )
        for planned in plan.layers
        if planned.scheme is not None and planned.target is not None
    ]


def _settings_used(plan: Plan) -> dict[str, Any]:
    """What the step was asked for, defaults resolved; only what applies to it."""
    step = quantize_step(plan)
    group_sizes = {scheme.group_size for scheme in plan.schemes.values()}
    used: dict[str, Any] = {
        "target": plan.target.name,
        "algorithm": plan.algorithm,
        "format": plan.format_name,
        "group_size": group_sizes.pop() if len(group_sizes) == 1 else None,  # None: the layers differ
        "damping": step.damping if plan.algorithm == "gptq" else None,
        "skip": list(step.skip),
    }
    if plan.algorithm == "gptq":
        used |= {"gptq": step.gptq.model_dump(mode="json"), "refine": step.refine}
    if plan.target.bits:
        used["smooth"] = step.smooth if step.smooth is not None else step.smooths_any
    if step.overrides:
        used["overrides"] = [override.model_dump(mode="json") for override in step.overrides]
    return used


def dequantized_note(checkpoint: Checkpoint) -> str | None:
    """What "original" means where the model was quantized already."""
    block = None if checkpoint.quantized is None else quantization(checkpoint.quantized)
    if block is None:
        return None
    return (
        f"the model was quantized already ({method_of(block)}): everything here started from its dequantized weights, "
        'and "original" is the model with these, not the one that they were rounded from'
    )


def _notes(plan: Plan) -> tuple[str, ...]:
    told = (
        found_note(plan.anatomy),
        class_note(plan.checkpoint),
        unmeasured_note(plan.anatomy),
        dtype_note(plan.checkpoint),
        dequantized_note(plan.checkpoint),
        cpu_note((planned.layer for planned in plan.layers), plan.schemes),
    )
    notes = tuple(note for note in told if note is not None)
    if not plan.split_groups:
        return notes
    return (
        *notes,
        f"skip leaves {len(plan.split_groups)} groups of layers half quantized, {plan.split_groups[0]} among them: "
        "transformers loads them, but engines that fuse q/k/v or gate/up (vLLM) need one scheme for each group",
    )


def _left_alone(plan: Plan) -> list[LayerRecord]:
    """Skipped layers and everything that is no linear layer of a block; norms and biases are too many to list."""
    records = [
        LayerRecord(planned.layer.name, (planned.layer.out, planned.layer.width), skipped=planned.skipped)
        for planned in plan.layers
        if planned.skipped is not None
    ]
    for name, reason in plan.anatomy.untouched.items():
        info = plan.checkpoint.tensors.get(name)
        if info is None:
            records.append(LayerRecord(name, (), skipped=reason))
        elif len(info.shape) >= 2 and is_weight(info):
            records.append(LayerRecord(plan.anatomy.module_name(name), tuple(info.shape), skipped=reason))
    return records
