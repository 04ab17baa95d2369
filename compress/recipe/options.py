"""Recipes and comparisons from the options of a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from compress.recipe.comparison import Comparison
from compress.recipe.document import scalar
from compress.recipe.origin import Fault, Origin, Path
from compress.recipe.quantize import Gptq
from compress.recipe.schema import Recipe
from compress.recipe.sentences import describe
from compress.recipe.words import one_of, shown

_QUANTIZE: Path = ("steps", 0, "quantize")
_PRUNE: Path = ("steps", 0, "prune")
_FIDELITY: Path = ("evaluate", "fidelity")

MEASURED: Mapping[str, Path] = {
    "--seed": ("seed",),
    "--evaluation": (*_FIDELITY, "source"),
    "--evaluation-tokens": (*_FIDELITY, "tokens"),
    "--evaluation-length": (*_FIDELITY, "length"),
    "--task": ("evaluate", "tasks"),
    "--task-items": ("evaluate", "items"),
    "--prompt": ("bench", "prompt"),
    "--new-tokens": ("bench", "new_tokens"),
    "--batch": ("bench", "batch"),
    "--engine": ("bench", "engine"),
    "--precision": ("bench", "precision"),
    "--gate": ("gates",),
    "--report": ("report",),
}
"""What all commands that measure have in common."""
RECIPE: Mapping[str, Path] = {
    "MODEL": ("model",),
    "--dequantize": ("dequantize",),
    "--output": ("output",),
    "--calibration": ("calibration", "source"),
    "--samples": ("calibration", "samples"),
    "--length": ("calibration", "length"),
    "--batch-size": ("calibration", "batch_size"),
    "--evaluate": ("evaluate",),
    "--bench": ("bench",),
    "--bench-budget": ("bench", "budget"),
    **MEASURED,
}
"""What `quantize` and `prune` have in common."""
OPTIONS: Mapping[str, Path] = {
    **RECIPE,
    "--target": (*_QUANTIZE, "target"),
    "--algorithm": (*_QUANTIZE, "algorithm"),
    "--format": (*_QUANTIZE, "format"),
    "--group-size": (*_QUANTIZE, "group_size"),
    "--symmetric": (*_QUANTIZE, "symmetric"),
    "--skip": (*_QUANTIZE, "skip"),
    "--override": (*_QUANTIZE, "overrides"),
    "--damping": (*_QUANTIZE, "damping"),
    "--gptq": (*_QUANTIZE, "gptq"),
    "--max-fallback": (*_QUANTIZE, "max_fallback"),
    "--refine": (*_QUANTIZE, "refine"),
    "--smooth": (*_QUANTIZE, "smooth"),
    "--max-shard-size": (*_QUANTIZE, "max_shard_size"),
}
"""The options that `recipe_from_options` knows, and the value of a recipe that each one sets."""
SHAPES: Mapping[str, Path] = {
    "--keep-ffn": (*_PRUNE, "keep", "ffn"),
    "--keep-heads": (*_PRUNE, "keep", "heads"),
    "--keep-kv-heads": (*_PRUNE, "keep", "kv_heads"),
    "--keep-layers": (*_PRUNE, "keep", "layers"),
    "--params": (*_PRUNE, "params"),
    "--size": (*_PRUNE, "size"),
}
"""The options that say what is kept."""
PRUNE_OPTIONS: Mapping[str, Path] = {
    **RECIPE,
    **SHAPES,
    "--importance": (*_PRUNE, "importance"),
    "--compensate": (*_PRUNE, "compensate"),
    "--ffn-multiple": (*_PRUNE, "ffn_multiple"),
    "--max-shard-size": (*_PRUNE, "max_shard_size"),
}
"""The options that `prune_from_options` knows."""
COMPARISON_OPTIONS: Mapping[str, Path] = {
    "ORIGINAL": ("original",),
    "RESULT": ("result",),
    "--output": ("output",),
    "--budget": ("bench", "budget"),
    "--evaluate": ("evaluate",),
    "--bench": ("bench",),
    **MEASURED,
}
"""The options that `comparison_from_options` knows."""

_GPTQ_NAMES: Mapping[Path, str] = {(*OPTIONS["--gptq"], name): f"--gptq {name}" for name in Gptq.model_fields}
"""How `--gptq NAME=VALUE` is named where a value is wrong."""

_SWITCHES = ("--evaluate", "--bench")
_TEXT = ("MODEL", "ORIGINAL", "RESULT", "--output", "--calibration", "--evaluation")
"""Options whose value is text even if it looks like a number: `--output 64`."""
_SWEPT = ("--prompt", "--new-tokens", "--batch")
"""Options that take several numbers: `--batch 1,4`."""

Model = TypeVar("Model", Recipe, Comparison)


def recipe_from_options(options: Mapping[str, Any]) -> Recipe:
    """The recipe that the options of a command stand for.

    Args:
        options: values by the names in OPTIONS; None means that the option was not given. `--evaluate` and
            `--bench` are True (on, with defaults) or False (off). Numbers may be text, as in a shell.

    Raises:
        UsageError: one line for every fault, each begins with the option.
        KeyError: a name that OPTIONS lacks.
    """
    origin = Origin(options={path: name for name, path in OPTIONS.items()} | dict(_GPTQ_NAMES))
    return _recipe(OPTIONS, options, origin, "quantize")


def prune_from_options(options: Mapping[str, Any]) -> Recipe:
    """The recipe that the options of `prune` stand for; as `recipe_from_options`, with the names in PRUNE_OPTIONS."""
    given = [name for name in SHAPES if options.get(name) is not None]
    origin = Origin(options={path: name for name, path in PRUNE_OPTIONS.items()} | {_PRUNE: one_of(given or [*SHAPES])})
    sentence = (
        "--params and --size search for the shape by themselves: give one of these options"
        if given
        else "must say what is kept: a share such as 0.75 or 75%, or a count such as 6; or what to search for"
    )
    return _recipe(PRUNE_OPTIONS, options, origin, "prune", {_PRUNE: sentence})


def _recipe(
    table: Mapping[str, Path],
    options: Mapping[str, Any],
    origin: Origin,
    step: str,
    reworded: Mapping[Path, str] | None = None,
) -> Recipe:
    def complete(tree: dict[Any, Any]) -> dict[Any, Any]:
        """The steps, collected by index, as a list. Without any option of the step, what it needs is missing."""
        steps = tree.get("steps", {0: {step: {}}})
        return {"version": 1, **tree, "steps": list(steps.values())}

    return _from_options(Recipe, table, options, origin, complete, reworded or {}).traced(origin)


def comparison_from_options(options: Mapping[str, Any]) -> Comparison:
    """The comparison that the options of `eval` or `bench` stand for; as `recipe_from_options`."""
    origin = Origin(options={path: name for name, path in COMPARISON_OPTIONS.items()})
    comparison = _from_options(Comparison, COMPARISON_OPTIONS, options, origin, lambda tree: tree, {})
    return comparison.traced(origin)


def _from_options(
    model: type[Model],
    table: Mapping[str, Path],
    options: Mapping[str, Any],
    origin: Origin,
    complete: Callable[[dict[Any, Any]], dict[Any, Any]],
    reworded: Mapping[Path, str],
) -> Model:
    """`reworded`: for some paths what is said there, where the rule of the recipe speaks of its keys."""
    given = {name: value for name, value in options.items() if value is not None}
    switches = {table[name][0]: given.pop(name) for name in _SWITCHES if name in given}
    tree: dict[Any, Any] = {section: {} for section, on in switches.items() if on}
    off = {section for section, on in switches.items() if not on}
    faults: list[Fault] = []
    for name, value in given.items():
        path = table[name]
        if path[0] in off:
            faults.append((path, f"has no effect together with --no-{path[0]}: leave one of them out"))
        else:
            _put(tree, path, _value(name, value, path, faults))
    try:
        found = model.model_validate(complete(tree) | dict.fromkeys(off))
    except ValidationError as error:
        found_wrong = [(path, reworded.get(path, sentence)) for path, sentence in describe(error, model)[0]]
        raise origin.error(faults + found_wrong) from error
    if faults:
        raise origin.error(faults)
    return found


def _value(name: str, value: Any, path: Path, faults: list[Fault]) -> Any:
    """The value of an option as a recipe has it; what has another form is added to `faults`."""
    if name == "--override" and isinstance(value, list):
        return _overrides(value, path, faults)
    if name == "--gptq" and isinstance(value, list):
        return _named_values(value, path, faults)
    if name in _SWEPT and isinstance(value, str) and "," in value:
        return [scalar(part) for part in value.split(",")]
    if not isinstance(value, str) or name in _TEXT:
        return value
    read = scalar(value)
    return value if read is None and name in SHAPES else read  # an empty shell variable is no way to keep all


def _put(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _overrides(texts: list[Any], path: Path, faults: list[Fault]) -> list[dict[str, Any]]:
    """`GLOB=TARGET[:GROUP_SIZE]` as maps of a recipe; what has another form is added to `faults`."""
    maps = []
    for index, text in enumerate(texts):
        glob, equals, what = str(text).rpartition("=")
        target, colon, size = what.partition(":")
        if not (glob.strip() and equals and target) or (colon and not size):
            form = "GLOB=TARGET or GLOB=TARGET:GROUP_SIZE, such as '*.down_proj=int8-weight'"
            faults.append(((*path, index), f"must be {form}, not {shown(text)}"))
        else:
            maps.append({"layers": glob, "target": target} | ({"group_size": scalar(size)} if colon else {}))
    return maps


def _named_values(texts: list[Any], path: Path, faults: list[Fault]) -> dict[str, Any]:
    """`NAME=VALUE` as a map of a recipe; what has another form, or comes twice, is added to `faults`."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in str(text).partition("="))
        if not (name and equals and value):
            faults.append((path, f"must be NAME=VALUE, such as asymmetric=false, not {shown(text)}"))
        elif name in found:
            faults.append((path, f"gives {name} twice"))
        else:
            found[name] = scalar(value)
    return found
