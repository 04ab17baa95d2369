"""What is fixed once a plan is accepted: device, dtype, options. Resources are checked here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.errors import MissingResourceError
from compress.model.checkpoint import Checkpoint
from compress.model.hub import resolve
from compress.plan.estimate import compute_dtype, estimate, stops_fit
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
        resume: go on with the blocks that an interrupted run of the same output has finished.
        command: the command as the user typed it, for the report; None from a library.
    """

    overwrite: bool = False
    device: str = "auto"
    trust_remote_code: bool = False
    resume: bool = False
    command: str | None = None


@dataclass(frozen=True)
class Job:
    """Everything that is fixed once the plan is accepted.

    Attributes:
        one_pass: memory holds all calibration windows stopped in the middle of a block; the result is the same without.
    """

    plan: Plan
    options: Options
    device: str
    compute_dtype: str
    instruction_sets: tuple[str, ...]
    one_pass: bool
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
    device = chosen_device(options.device)
    torch.manual_seed(plan.recipe.seed)
    if device == "cuda":
        here = replace(here, memory_available=torch.cuda.mem_get_info()[0])
    dtype, one_pass = compute_dtype(plan, device, here), stops_fit(plan, here)
    return Job(plan, options, device, dtype, here.instruction_sets, one_pass, progress)


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
