"""What a written folder is to be compared with: the plan, hashes, and answers to a few windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from compress.durable import write_tensors
from compress.journal import Journal
from compress.model.architectures import Kind
from compress.output import Workspace
from compress.pipeline.job import Job
from compress.pipeline.texts import capped
from compress.records import StepRecord

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from compress.data.windows import Windows
    from compress.formats.proof import ProofJob

BLOCK_PROOF_WINDOWS, BLOCK_PROOF_LENGTH = 2, 16  # the same where one block at a time is in memory
PROOF_WINDOWS, PROOF_LENGTH = 4, 128  # what the fresh process recomputes: enough to see any wrong tensor


def proof_job(job: Job, workspace: Workspace, step: StepRecord, evaluation: Windows | None) -> ProofJob:
    """What the staged folder is to be compared with; what will be measured answers a few windows for it."""
    logits = workspace.partial / "logits.safetensors"
    _write_logits(job, workspace.stage, evaluation, logits)
    return _proof_of(job, workspace, step, logits)


def block_proof_job(
    job: Job, workspace: Workspace, journal: Journal, step: StepRecord, evaluation: Windows | None
) -> ProofJob:
    """As `proof_job`, of a model that memory does not hold: what the journal holds answers, block by block."""
    from compress.formats.proof_blocks import meant_outputs

    plan = job.plan
    outputs = workspace.partial / "outputs.safetensors"
    windows = [ids[:BLOCK_PROOF_LENGTH] for ids in proof_ids(job, evaluation)[:BLOCK_PROOF_WINDOWS]]
    found = meant_outputs(
        job.checkpoint,
        plan.anatomy,
        windows,
        layers=[planned.layer for planned in plan.quantized],
        quantized=journal.load,
        replaced=journal.replaced(),
        cast=plan.cast,
    )
    write_tensors(outputs, named_cases(windows, found))
    return replace(_proof_of(job, workspace, step, outputs), by_block=True)


def _proof_of(job: Job, workspace: Workspace, step: StepRecord, logits: Path) -> ProofJob:
    from compress.formats.proof import ProofJob, loader_of

    plan = job.plan
    return ProofJob(
        workspace.stage,
        planned=plan.shards,
        weight_sha256={layer.name: layer.sha256 for layer in step.layers if layer.sha256 is not None},
        logits=logits,
        kind=plan.anatomy.kind,
        loader=loader_of(plan.format_name, plan.schemes.values()),
        trust_remote_code=job.options.trust_remote_code,
        source=job.checkpoint.folder,
        replaced_sha256=step.replaced,
    )


def proof_ids(job: Job, evaluation: Windows | None) -> list[torch.Tensor]:
    """A few fixed windows: of the evaluation text, or of random tokens where there is none."""
    import torch

    from compress.model.load import vocabulary

    if evaluation is not None:
        return [ids[:PROOF_LENGTH] for ids in evaluation.ids[:PROOF_WINDOWS]]
    generator = torch.Generator().manual_seed(job.recipe.seed)
    original = job.plan.original
    length = capped(original.positions, PROOF_LENGTH, job.progress)
    ids = vocabulary(original, trust_remote_code=job.options.trust_remote_code)
    return [torch.randint(ids, (length,), generator=generator) for _ in range(PROOF_WINDOWS)]


def named_cases(windows: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Windows of ids [T] and what a model answers to each, under the names of the proof's file."""
    tensors = {f"window.{index}": ids.contiguous() for index, ids in enumerate(windows)}
    return tensors | {f"logits.{index}": answer.contiguous() for index, answer in enumerate(answers)}


def answers(model: PreTrainedModel, windows: Sequence[torch.Tensor], kind: Kind) -> list[torch.Tensor]:
    """To each window: logits [T, V], or an encoder's last hidden states [T, d]."""
    import torch

    found: list[torch.Tensor] = []
    with torch.inference_mode():
        for ids in windows:
            if kind == "decoder":
                found.append(model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].clone())
            else:
                found.append(model.base_model(input_ids=ids.unsqueeze(0)).last_hidden_state[0].clone())
    return found


def _write_logits(job: Job, folder: Path, evaluation: Windows | None, target: Path) -> None:
    """Answers of the model that will be measured."""
    import torch

    from compress.formats import proof_inputs
    from compress.model.inputs import random_inputs
    from compress.runtime.load import load_reference

    trusted = job.options.trust_remote_code
    model = load_reference(folder, dtype=torch.float32, device="cpu", trust_remote_code=trusted)
    kind = job.plan.anatomy.kind
    if kind == "other":
        made = random_inputs(type(model), model.config, job.recipe.seed, PROOF_WINDOWS)
        with torch.inference_mode():
            cases = [(inputs, proof_inputs.outputs(model, inputs, "other")) for inputs in made]
        write_tensors(target, proof_inputs.named_tensors(cases))
        return
    windows = proof_ids(job, evaluation)
    write_tensors(target, named_cases(windows, answers(model, windows, kind)))
