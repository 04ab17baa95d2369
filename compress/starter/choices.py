"""What a recipe for a model should say, chosen from its config and headers: no weights, no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from compress.model.architectures import ARCHITECTURES, Kind
from compress.model.checkpoint import Checkpoint
from compress.model.hub import is_local, resolve
from compress.model.kind import model_kind
from compress.plan.planning import Plan, default_output, make_plan
from compress.recipe.options import recipe_from_options
from compress.scheme import AUTO_GROUP_SIZES, PER_CHANNEL, TARGETS, Target
from compress.starter.quoting import quoted

WINDOW, PROMPT, NEW_TOKENS = 512, 128, 48
"""Tokens, where the model has room for so many."""
TASK_POSITIONS = 256
"""Room that the items of the task inside the package need; byte by byte they would need about four times as much."""
SLACK = 1.05
"""Of the size gate over the planned bytes: for a changed `skip`, not for a changed target."""


@dataclass(frozen=True)
class Limits:
    """Gates that a sound result of a target meets and a broken one does not; loss of accuracy and of nDCG in points."""

    kl: str
    cosine: str
    accuracy: int
    ndcg: int


LIMITS = {
    "fp16": Limits("0.005", "0.999", 1, 1),
    "bf16": Limits("0.01", "0.99", 1, 1),
    "fp8": Limits("0.06", "0.95", 3, 2),
    "int8": Limits("0.06", "0.95", 3, 2),
    "int8-weight": Limits("0.006", "0.99", 2, 1),
    "int4": Limits("0.30", "0.90", 5, 5),
    "nf4": Limits("0.50", "0.90", 5, 5),
    "int8-bnb": Limits("0.06", "0.95", 3, 2),
}


@dataclass(frozen=True)
class Start:
    """Attributes:
    model: as the recipe names it: a folder as a path (never a name that may be a hub id elsewhere), a hub model pinned
        to its commit.
    pinned: whether that commit was added here.
    output: folder for the result, which the model does not contain.
    block: glob of the first block's layers.
    group_size: as the recipe gives it; None where the target has no groups.
    group: the number that it stands for.
    algorithm: None where it is the target's own.
    length: tokens in a window of calibration and evaluation.
    prompt, new_tokens: of the benchmark; both fit the positions together.
    start, answer: the same of the generated answers.
    tasks: whether the task inside the package fits.
    megabytes: the size gate.
    """

    model: str
    pinned: bool
    output: str
    block: str
    kind: Kind
    target: Target
    format_name: str
    group_size: str | None
    group: int | None
    algorithm: str | None
    calibrates: bool
    length: int
    prompt: int
    new_tokens: int
    start: int
    answer: int
    tasks: bool
    megabytes: str
    limits: Limits


def choose(model: str, target: str | None, here: Path) -> tuple[Start, Checkpoint]:
    """Looks at a model and decides what its recipe says.

    Args:
        target: None is int4 for decoders and int8 for encoders, which are smaller and read, not generate.
        here: the folder that the recipe's paths start from.

    Raises:
        UsageError: an unknown target, a model that cannot be quantized, or not to this target.
        MissingResourceError: no such model.
    """
    quoted(model)  # refuses what no recipe can hold
    if target is not None:
        recipe_from_options({"MODEL": model, "--target": target})
    checkpoint = resolve(model, weights=False)
    entry = ARCHITECTURES.get(checkpoint.model_type)  # where there is none, the plan says so
    generates = model_kind(checkpoint.config) == "decoder"
    row = TARGETS[target or ("int4" if generates else "int8")]
    format_name = "gptq" if entry is not None and entry.transposed and "gptq" in row.formats else row.formats[0]
    options = {"MODEL": model, "--target": row.name, "--format": format_name, "--evaluate": False}
    if row.default_algorithm == "gptq" and (entry is None or not entry.linears):
        options |= {"--algorithm": "rtn"}  # nothing can be calibrated
    first = options | ({"--group-size": PER_CHANNEL} if row.grouped else {})
    plan = make_plan(recipe_from_options(first), checkpoint)
    if row.grouped and (group := _group_size(plan)) != PER_CHANNEL:
        plan = make_plan(recipe_from_options(options | {"--group-size": group}), checkpoint)
    return _start(plan, here), checkpoint


def _group_size(plan: Plan) -> int:
    """What `auto` stands for where it is the target's own and fits; else one scale per output channel."""
    if plan.target.default_group_size != "auto":
        return PER_CHANNEL
    widths = {planned.layer.width for planned in plan.quantized}
    fitting = (size for size in AUTO_GROUP_SIZES if all(width % size == 0 for width in widths))
    return next(fitting, PER_CHANNEL)


def _start(plan: Plan, here: Path) -> Start:
    model, revision, positions = plan.recipe.model, plan.checkpoint.revision, plan.checkpoint.positions
    pinned = revision is not None and "@" not in model
    room = positions or WINDOW
    new_tokens = max(2, min(NEW_TOKENS, room // 4)) if plan.anatomy.kind == "decoder" else 0
    answer = max(1, min(NEW_TOKENS, room // 2))
    group = next(iter(plan.schemes.values())).group_size if plan.target.grouped else None
    return Start(
        model=f"{model}@{revision}" if pinned else portable(model, here),
        pinned=pinned,
        output=_output(model, plan.target.name, here),
        block=f"{plan.anatomy.block_name(0)}.*",
        kind=plan.anatomy.kind,
        target=plan.target,
        format_name=plan.format_name,
        group_size=None if group is None else str(group) if group == PER_CHANNEL else "auto",
        group=group,
        algorithm=plan.algorithm if plan.algorithm != plan.target.default_algorithm else None,
        calibrates=plan.calibrates,
        length=max(2, min(WINDOW, room)),
        prompt=max(1, min(PROMPT, room - new_tokens)),
        new_tokens=new_tokens,
        start=max(1, min(32, room - answer)),
        answer=answer,
        tasks=plan.anatomy.kind == "decoder" and room >= TASK_POSITIONS,
        megabytes=megabytes(plan.weight_bytes * SLACK),
        limits=LIMITS[plan.target.name],
    )


def absolute(path: Path) -> Path:
    """The path from the root of the file system, without `..`; links stay, as they are part of a repository."""
    return Path(os.path.normpath(path.expanduser().absolute()))


def portable(model: str, here: Path) -> str:
    """A folder below `here` as a relative path that starts with a point; anything else as it is."""
    if not is_local(model):
        return model
    folder, root = absolute(Path(model)), absolute(here)
    if not folder.is_relative_to(root):
        return model
    inside = folder.relative_to(root).as_posix()
    return "." if inside == "." else f"./{inside}"


def _output(model: str, target: str, here: Path) -> str:
    """`out/<model name>-<target>`, or beside the model where we stand in it: nothing is written into a model."""
    name = default_output(model, target).name
    if is_local(model):
        folder = Path(model).expanduser().resolve()
        if (here.resolve() / "out").is_relative_to(folder):
            return Path(os.path.relpath(folder.parent / name, here.resolve())).as_posix()
    return f"out/{name}"


def megabytes(size: float) -> str:
    """`size` bytes in MB, rounded up to three digits."""
    step = 10 ** (math.floor(math.log10(size)) - 2)
    return f"{math.ceil(size / step) * step / 1e6:.12f}".rstrip("0").rstrip(".")
