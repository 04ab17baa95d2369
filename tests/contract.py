"""Takes tiny models through pairs of target and format with the parts of the pipeline; one process proves them all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import tiny_moe
import tiny_more
import torch
from transformers import PreTrainedModel

from compress.errors import UsageError
from compress.formats import proof_inputs
from compress.formats.proof import ProofJob, ProofRecord, prove_all
from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.fit import check_fit
from compress.model.load import load_original
from compress.model.naming import module_finder
from compress.pipeline.build import quantize, write
from compress.pipeline.job import Options, open_job
from compress.pipeline.proving import proof_job
from compress.pipeline.ready import check_modules, check_packages
from compress.pipeline.resuming import open_journal
from compress.pipeline.texts import calibration_windows, read_texts
from compress.plan.machine import machine
from compress.plan.planning import Plan, make_plan
from compress.progress import Silent
from compress.recipe.schema import Recipe
from compress.records import StepRecord
from compress.scheme import TARGETS
from compress.workspace import opened

BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    "llama": tiny.tiny_llama,
    "mistral": tiny.tiny_mistral,
    "qwen2": tiny.tiny_qwen2,
    "qwen3": tiny.tiny_qwen3,
    "smollm3": tiny.tiny_smollm3,
    "olmo2": tiny.tiny_olmo2,
    "phi3": tiny.tiny_phi3,
    "gemma": tiny.tiny_gemma,
    "gemma2": tiny.tiny_gemma2,
    "gemma3_text": tiny.tiny_gemma3,
    "opt": tiny.tiny_opt,
    "gpt2": tiny.tiny_gpt2,
    "gpt_neox": tiny.tiny_gpt_neox,
    "bert": tiny.tiny_bert,
    "roberta": tiny.tiny_roberta,
    "xlm-roberta": tiny_more.tiny_xlm_roberta,
    "distilbert": tiny.tiny_distilbert,
    "mpnet": tiny_more.tiny_mpnet,
    "modernbert": tiny_more.tiny_modernbert,
    "vit": tiny_more.tiny_vit,
    "whisper": tiny_more.tiny_whisper,
    "t5": tiny_more.tiny_t5,
    "mixtral": tiny_moe.tiny_mixtral,
    "qwen3_moe": tiny_moe.tiny_qwen3_moe,
    "gptj": tiny_more.tiny_gptj,
}
"""{model type: what builds a tiny one}; gptj is in no table and is found by the names of its tensors."""


@dataclass(frozen=True, order=True)
class Pair:
    """One cell of the table: `step` is what the recipe says beside target and format."""

    target: str
    format: str
    step: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        return {"asymmetric": {"symmetric": False}, "rtn": {"algorithm": "rtn"}, "": {}}[self.step]

    def __str__(self) -> str:
        return " ".join(filter(None, (self.target, self.format, self.step)))


PAIRS = tuple(
    Pair(target.name, name, step)
    for target in TARGETS.values()
    for name in target.formats
    for step in ("", *(("asymmetric",) if target.asymmetric and name in ("compressed-tensors", "gptq_v2") else ()))
)
ROUNDED = tuple(Pair("int4", name, "rtn") for name in TARGETS["int4"].formats)
"""For models that nothing can be calibrated of."""
DEFAULTS = tuple(Pair(name, TARGETS[name].formats[0]) for name in ("int4", "int8"))
"""What every commit goes through."""


@dataclass(frozen=True)
class Made:
    """What is on the disk of one cell, before it is proved."""

    plan: Plan
    step: StepRecord
    proof_job: ProofJob


@dataclass
class Outcome:
    """What became of some cells: refused for a reason, or made and proved."""

    refused: dict[tuple[str, Pair], UsageError] = field(default_factory=dict)
    made: dict[tuple[str, Pair], Made] = field(default_factory=dict)
    proved: dict[tuple[str, Pair], ProofRecord] = field(default_factory=dict)
    distances: dict[tuple[str, Pair], float] = field(default_factory=dict)


def outcome_of(
    folder: Path,
    cells: Iterable[tuple[str, Pair]],
    builders: Mapping[str, Callable[[Path], Path]] = BUILDERS,
    judge: Callable[[str, Pair, Made], None] = lambda _name, _pair, _made: None,
) -> Outcome:
    """Builds, quantizes and writes every cell, then proves all of them in one fresh process.

    Args:
        judge: sees every cell while its stage is there.
    """
    found = Outcome()
    with contextlib.ExitStack() as stack:
        for name, pair in cells:
            source = folder / name
            if not source.is_dir():
                builders[name](source)
            try:
                found.made[name, pair] = made(source, folder / f"{name}-{pair}", pair, stack)
            except UsageError as error:
                found.refused[name, pair] = error
        for (name, pair), one in found.made.items():
            found.distances[name, pair] = _distance(folder / name, one.proof_job)
            judge(name, pair, one)
        records = prove_all([one.proof_job for one in found.made.values()])
        found.proved = dict(zip(found.made, records, strict=True))
    return found


def made(source: Path, output: Path, pair: Pair, stack: contextlib.ExitStack, **step: Any) -> Made:
    """One cell, in the stage of a workspace that is open as long as `stack`; `step` adds to the recipe's step.

    Raises:
        UsageError: as the pipeline does before a weight is loaded.
    """
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "model": str(source),
            "output": str(output),
            "calibration": {"samples": 2, "length": 32},
            "steps": [{"quantize": {"target": pair.target, "format": pair.format, **pair.fields, **step}}],
            "evaluate": None,
            "bench": None,
        }
    )
    plan = make_plan(recipe, open_checkpoint(source))
    texts = read_texts(plan)
    check_packages(plan)
    job = open_job(plan, Options(), machine(), Silent())
    found = [planned.layer for planned in plan.quantized] if plan.anatomy.by_name else ()
    check_fit(job.checkpoint, trust_remote_code=False, found=found, reads_text=plan.anatomy.kind != "other")
    check_modules(job)
    workspace = stack.enter_context(opened(plan.output, source, overwrite=False, resume=False, say=Silent().say))
    windows = calibration_windows(job, texts[0])
    journal = open_journal(job, workspace, windows)
    step_record = quantize(job, journal, windows)
    write(job, workspace, journal)
    return Made(plan, step_record, proof_job(job, workspace, step_record, None))


@torch.inference_mode()
def _distance(source: Path, job: ProofJob) -> float:
    """How far the result's outputs are from the original's, where those of a model with empty matrices are 1."""
    original, empty = (_original(source) for _ in range(2))
    find = module_finder(empty)
    for layer in anatomy(open_checkpoint(source)).layers:
        path = find(layer.name)
        if path is not None:
            torch.nn.init.zeros_(empty.get_submodule(path).weight)
    for name, parameter in empty.named_parameters():
        if ".experts." in name:
            torch.nn.init.zeros_(parameter)
    lost, all_of_it = 0.0, 0.0
    for inputs, measured in proof_inputs.read_cases(job.logits):
        expected = proof_inputs.outputs(original, inputs, job.kind)
        lost += float((measured - expected).square().sum())
        all_of_it += float((proof_inputs.outputs(empty, inputs, job.kind) - expected).square().sum())
    return (lost / all_of_it) ** 0.5


def _original(source: Path) -> PreTrainedModel:
    return load_original(open_checkpoint(source), dtype=torch.float32, device="cpu")
