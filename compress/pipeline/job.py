"""What is fixed once a plan is accepted: device, dtype, options. Resources are checked here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from compress.errors import MissingResourceError
from compress.model.checkpoint import Checkpoint
from compress.model.hub import resolve
from compress.plan.estimate import estimate
from compress.plan.machine import Machine
from compress.plan.memory import (
    compute_dtype,
    gradients_fit,
    gradients_needed,
    measuring_bytes,
    proof_and_quantize_bytes,
    states_fit,
    stops_fit,
    whole_fits,
)
from compress.plan.planning import Plan, make_plan
from compress.progress import Progress
from compress.recipe.schema import Recipe
from compress.workspace import check_space


@dataclass(frozen=True)
class Options:
    """What the command line says beside the recipe.

    Attributes:
        device: "auto", "cpu" or "cuda".
        resume: go on with the blocks that an interrupted run of the same output has finished.
        command: the command as the user typed it, for the report; None from a library.
        memory: bytes that models and activations may take; what is larger is worked on in pieces, from the disk. None
            for what the machine has free.
    """

    overwrite: bool = False
    device: str = "auto"
    trust_remote_code: bool = False
    resume: bool = False
    command: str | None = None
    memory: int | None = None


@dataclass(frozen=True)
class Job:
    """Everything that is fixed once the plan is accepted.

    Attributes:
        one_pass: memory holds all calibration windows stopped in the middle of a block; the result is the same without.
        spill: it does not even hold them in front of a block; they wait on the disk.
        whole: it holds the result as a dense model, which is proved whole then, and block by block otherwise.
        gradients: it holds the model that is pruned with its gradients.
    """

    plan: Plan
    options: Options
    device: str
    compute_dtype: str
    instruction_sets: tuple[str, ...]
    one_pass: bool
    spill: bool
    whole: bool
    gradients: bool
    progress: Progress

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def checkpoint(self) -> Checkpoint:
        return self.plan.checkpoint


def check_resources(plan: Plan, here: Machine, memory: int | None = None) -> None:
    """Refuses what this machine cannot do, before the work.

    Args:
        memory: what the user allows; None for all that is free.

    Raises:
        MissingResourceError: not enough memory or disk.
    """
    limited = here.limited(memory)
    guess = estimate(plan, limited)
    dense = plan.original.weight_bytes if plan.original.quantized is not None else 0
    check_space(plan.output, guess.disk_bytes + dense)
    whole, gradients = measuring_bytes(plan), gradients_needed(plan)
    allowed = "are free" if limited == here else "are allowed by --memory"
    if gradients > limited.memory_available:
        raise MissingResourceError(
            f"a search, the importance taylor and the choice of layers work on the whole model, which needs about "
            f"{gradients / 1e9:.1f} GB of memory, {limited.memory_available / 1e9:.1f} GB {allowed}.",
            hint="A shorter --length needs less. Without the whole model, --importance activation and magnitude choose "
            "layers, and obs heads and channels.",
        )
    if whole > limited.memory_available:
        raise MissingResourceError(
            f"comparing and timing whole models needs about {whole / 1e9:.1f} GB of memory, "
            f"{limited.memory_available / 1e9:.1f} GB {allowed}.",
            hint="With --no-evaluate --no-bench the model is worked on and proved block by block, which needs about "
            f"{proof_and_quantize_bytes(plan, limited) / 1e9:.1f} GB.",
        )
    if guess.memory_bytes > here.memory_available:
        raise MissingResourceError(
            f"the run needs about {guess.memory_bytes / 1e9:.1f} GB of memory, "
            f"{here.memory_available / 1e9:.1f} GB are free.",
            hint="Fewer --samples or a shorter --length need less; or use a larger machine.",
        )


def open_job(plan: Plan, options: Options, here: Machine, progress: Progress) -> Job:
    """Downloads a hub model's weights and settles device and dtype."""
    import torch

    if not plan.original.has_weights:
        plan = make_plan(plan.recipe, resolve(plan.recipe.model, weights=True))
    device = chosen_device(options.device)
    limited = here.limited(options.memory)
    torch.manual_seed(plan.recipe.seed)
    if device == "cuda":
        here = replace(here, memory_available=torch.cuda.mem_get_info()[0])
    here = here.limited(options.memory)
    return Job(
        plan,
        options,
        device,
        compute_dtype(plan, device, here),
        here.instruction_sets,
        one_pass=stops_fit(plan, here),
        spill=not states_fit(plan, here),
        whole=whole_fits(plan, limited),
        gradients=gradients_fit(plan, here),
        progress=progress,
    )


def on_dense_weights(job: Job, folder: Path) -> Job:
    """The job on what it starts from; a quantized model's dense weights are written into `folder` for it.

    Raises:
        UsageError: the model's tensors contradict its configuration.
        MissingResourceError: the disk is full.
    """
    source = job.plan.original.quantized
    if source is None:
        return job
    from compress.formats.dequantize import write_dense

    trusted = job.options.trust_remote_code
    dense = write_dense(source, folder, trust_remote_code=trusted, progress=job.progress)
    pruned = job.plan.pruned
    if pruned is not None:
        return replace(job, plan=replace(job.plan, pruned=replace(pruned, source=dense)))
    return replace(job, plan=replace(job.plan, checkpoint=dense))


def chosen_device(asked: str) -> str:
    """`auto` as what there is.

    Raises:
        MissingResourceError: a GPU is asked for and there is none.
    """
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise MissingResourceError(
            "--device cuda: torch sees no GPU.", hint="Use --device cpu, or see `compress doctor`."
        )
    return asked
