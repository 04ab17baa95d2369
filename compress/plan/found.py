"""What a recipe becomes on models that cannot be calibrated, or whose answers are not measured.

Layers that were found by name are rounded to nearest, each on its own: nothing is known of the order in which they
see their inputs, nor are there inputs for models that read no text. Answers and times are measured of models that
go on with a text or read one; of others there are sizes and the proof.
"""

from __future__ import annotations

from compress.model.anatomy import Anatomy
from compress.model.checkpoint import CONFIG_FILE, Checkpoint, parse_config
from compress.recipe.origin import Fault, Path
from compress.recipe.quantize import Quantize
from compress.recipe.schema import Recipe


def fitted(recipe: Recipe, parts: Anatomy) -> Recipe:
    """The recipe without defaults that this model cannot have.

    Raises:
        UsageError: it asks for calibration or for tasks in so many words, or its algorithm is gptq.
    """
    if not parts.by_name:
        return recipe
    step = recipe.quantize
    if step is None:
        return recipe.model_copy(update={"evaluate": None, "bench": None}) if parts.kind == "other" else recipe
    faults = _calibration_faults(step, parts, recipe.step_path("quantize")) + _task_faults(recipe, parts)
    if faults:
        raise recipe.error(faults)
    if step.smooth is None and step.smooths_any:
        step = step.model_copy(update={"smooth": False})
        recipe = recipe.with_step(step)
    return recipe.model_copy(update={"evaluate": None, "bench": None}) if parts.kind == "other" else recipe


def found_note(parts: Anatomy) -> str | None:
    """What a reader should know of layers that no entry of the table vouches for."""
    if parts.known:
        return None
    stacks = dict.fromkeys(layer.place.stack or "numbered modules" for layer in parts.layers)
    return (
        f"{parts.model_type} is not in the table of model types: {len(parts.layers)} linear layers were found by name "
        f"in {', '.join(stacks)}; everything else is left alone"
    )


def unmeasured_note(parts: Anatomy) -> str | None:
    """Why there are no answers and no times."""
    if parts.kind != "other":
        return None
    return (
        f"answers and times of {parts.model_type} are not measured: this version of compress measures models that "
        "go on with a text or read one; the proof compares outputs on inputs made at random"
    )


def _calibration_faults(step: Quantize, parts: Anatomy, path: Path) -> list[Fault]:
    faults: list[Fault] = []
    if step.used_algorithm == "gptq":
        text = f"GPTQ needs calibration input, and for {parts.model_type} there is none yet: use --algorithm rtn"
        faults.append(((*path, "algorithm"), text))
    if step.smooth:
        text = f"smoothing needs calibration input, and for {parts.model_type} there is none yet: leave it out"
        faults.append(((*path, "smooth"), text))
    return faults


def _task_faults(recipe: Recipe, parts: Anatomy) -> list[Fault]:
    if parts.kind != "other" or recipe.evaluate is None:
        return []
    return [
        (("evaluate", "tasks", index), f"{task.name} is not for {parts.model_type}: its answers are not measured")
        for index, task in enumerate(recipe.evaluate.tasks)
    ]


def class_note(checkpoint: Checkpoint) -> str | None:
    """Where config.json names a class with a head and the file was saved from the one without."""
    stated = parse_config(checkpoint.folder / CONFIG_FILE).get("architectures")
    taken = checkpoint.config.get("architectures")
    if not stated or not taken or stated == taken:
        return None
    return f"config.json names {stated[0]}, but the file holds no head: it is read, and written, as {taken[0]}"
