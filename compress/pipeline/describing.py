"""What a folder says of itself: README.md, compress.json, and its sizes beside the original's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compress.durable import write_bytes
from compress.model.cache import kv_bytes
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.output import PROVENANCE, Workspace
from compress.pipeline.answers import Answers
from compress.pipeline.job import Job
from compress.pipeline.reporting import bare_report, model_part
from compress.plan.planning import Plan
from compress.records import Measurement, StepRecord
from compress.report.card import model_card
from compress.report.provenance import provenance

if TYPE_CHECKING:
    from compress.data.windows import Windows
    from compress.formats.proof import ProofRecord


def describe(
    job: Job,
    workspace: Workspace,
    steps: Sequence[StepRecord],
    proof: ProofRecord,
    answers: Answers,
    held_out: Windows | None,
) -> None:
    """README.md and compress.json; the card says nothing that another run would measure differently."""
    import torch

    plan, stage = job.plan, workspace.stage
    measurements = sizes(job, open_checkpoint(stage)) + answers.measurements
    original_card = stage / "README.original.md"
    source_card = original_card.read_text(encoding="utf-8", errors="replace") if original_card.is_file() else None
    card = model_card(
        bare_report(job, steps, proof, measurements, answers.tasks, held_out),
        format_name=plan.format_name,
        target=plan.target.name,
        kind=plan.anatomy.kind,
        source_card=source_card,
        experts=plan.anatomy.has_experts,
        architecture=plan.class_name,
    )
    write_bytes(stage / "README.md", card.encode())
    content = provenance(
        stage=stage,
        recipe=plan.recipe.model_dump(mode="json"),
        model=model_part(plan.original, job.recipe.model).model_dump(),
        steps=steps,
        threads=torch.get_num_threads(),
        compute_dtype=job.compute_dtype,
    )
    write_bytes(stage / PROVENANCE, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def sizes(job: Job, result: Checkpoint) -> list[Measurement]:
    """Bytes, parameters, bits per weight and cache of original and result."""
    from compress.measure.size import size_measurements

    plan = job.plan
    return size_measurements(
        plan.original,
        result,
        original_parameters=plan.original_parameters,
        result_parameters=plan.parameters,
        kv_bytes=_kv_bytes(plan),
        quantized_bytes=plan.quantized_bytes,
        quantized_parameters=plan.quantized_parameters,
    )


def _kv_bytes(plan: Plan) -> tuple[int, int] | None:
    """Bytes of the cache for each token, of original and result."""
    cast = {"float16": "F16", "bfloat16": "BF16"}.get(plan.cast or "")
    before = kv_bytes(plan.anatomy if plan.pruned is None else plan.pruned.anatomy)
    after = kv_bytes(plan.anatomy, cast)
    return None if before is None or after is None else (before, after)
