"""What is fixed once a plan is accepted: device, dtype, options. Resources are checked here."""

from __future__ import annotations

from dataclasses import dataclass

from compress.errors import MissingResourceError
from compress.model.checkpoint import Checkpoint
from compress.model.hub import resolve
from compress.plan.estimate import estimate
from compress.plan.machine import Machine
from compress.plan.planning import Plan, make_plan
from compress.progress import Progress
from compress.recipe.schema import Recipe
from compress.workspace import check_space


@dataclass(frozen=True)
class Options:
    """What the command line says beside the recipe.

    Attributes:
        device: "auto", "cpu" or "cuda".
        command: the command as the user typed it, for the report; None from a library.
    """

    overwrite: bool = False
    device: str = "auto"
    trust_remote_code: bool = False
    command: str | None = None


@dataclass(frozen=True)
class Job:
    """Everything that is fixed once the plan is accepted."""

    plan: Plan
    options: Options
    device: str
    compute_dtype: str
    progress: Progress

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def checkpoint(self) -> Checkpoint:
        return self.plan.checkpoint


def check_resources(plan: Plan, here: Machine) -> None:
    guess = estimate(plan, here)
    check_space(plan.output, guess.disk_bytes)
    if here.memory_available is not None and guess.memory_bytes > here.memory_available:
        raise MissingResourceError(
            f"the run needs about {guess.memory_bytes / 1e9:.1f} GB of memory, "
            f"{here.memory_available / 1e9:.1f} GB are free.",
            hint="Fewer --samples or a shorter --length need less; or use a larger machine.",
        )


def open_job(plan: Plan, options: Options, here: Machine, progress: Progress) -> Job:
    """Downloads a hub model's weights and settles device and dtype."""
    import torch

    checkpoint = plan.checkpoint
    if not checkpoint.has_weights:
        plan = make_plan(plan.recipe, resolve(plan.recipe.model, weights=True))
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingResourceError(
            "--device cuda: torch sees no GPU.", hint="Use --device cpu, or see `compress doctor`."
        )
    torch.manual_seed(plan.recipe.seed)
    return Job(plan, options, device, compute_dtype(plan, device, here), progress)


def compute_dtype(plan: Plan, device: str, here: Machine) -> str:
    """The dtype of the forward passes of calibration: the source's where the machine multiplies it fast.

    Without AMX or AVX512-BF16 a CPU takes several times as long for a bfloat16 product as for a float32 one, and no
    CPU is quick with float16. Statistics and solves are float32 and float64 everywhere.
    """
    source = {"BF16": "bfloat16", "F16": "float16"}.get(plan.anatomy.layers[0].dtype, "float32")
    if source == "float32" or device != "cpu":
        return source
    fast = {"amx_bf16", "avx512_bf16"} & set(here.instruction_sets)
    return source if source == "bfloat16" and fast else "float32"
