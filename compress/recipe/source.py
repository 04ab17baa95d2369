"""Recipes from YAML files and from the options of a command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compress.errors import Problem, RecipeError, UsageError
from compress.recipe.document import Document, NotYamlError, position_at, read_document, scalar
from compress.recipe.origin import Fault, Origin, in_order
from compress.recipe.origin import Path as KeyPath
from compress.recipe.quantize import Gptq
from compress.recipe.schema import Recipe
from compress.recipe.sentences import describe
from compress.recipe.words import shown

_MAX_BYTES = 1_000_000
"""A larger file is something else, perhaps the model."""

_QUANTIZE: KeyPath = ("steps", 0, "quantize")
_FIDELITY: KeyPath = ("evaluate", "fidelity")

OPTIONS: Mapping[str, KeyPath] = {
    "MODEL": ("model",),
    "--output": ("output",),
    "--seed": ("seed",),
    "--target": (*_QUANTIZE, "target"),
    "--algorithm": (*_QUANTIZE, "algorithm"),
    "--format": (*_QUANTIZE, "format"),
    "--group-size": (*_QUANTIZE, "group_size"),
    "--skip": (*_QUANTIZE, "skip"),
    "--override": (*_QUANTIZE, "overrides"),
    "--damping": (*_QUANTIZE, "damping"),
    "--gptq": (*_QUANTIZE, "gptq"),
    "--max-fallback": (*_QUANTIZE, "max_fallback"),
    "--refine": (*_QUANTIZE, "refine"),
    "--smooth": (*_QUANTIZE, "smooth"),
    "--max-shard-size": (*_QUANTIZE, "max_shard_size"),
    "--calibration": ("calibration", "source"),
    "--samples": ("calibration", "samples"),
    "--length": ("calibration", "length"),
    "--batch-size": ("calibration", "batch_size"),
    "--evaluate": ("evaluate",),
    "--evaluation": (*_FIDELITY, "source"),
    "--evaluation-tokens": (*_FIDELITY, "tokens"),
    "--evaluation-length": (*_FIDELITY, "length"),
    "--bench": ("bench",),
    "--prompt": ("bench", "prompt"),
    "--new-tokens": ("bench", "new_tokens"),
    "--batch": ("bench", "batch"),
    "--bench-seconds": ("bench", "seconds"),
    "--engine": ("bench", "engine"),
    "--gate": ("gates",),
    "--report": ("report",),
}
"""The options that `recipe_from_options` knows, and the value of a recipe that each one sets."""

_GPTQ_NAMES: Mapping[KeyPath, str] = {(*OPTIONS["--gptq"], name): f"--gptq {name}" for name in Gptq.model_fields}
"""How `--gptq NAME=VALUE` is named where a value is wrong."""

_SWITCHES = ("--evaluate", "--bench")
_TEXT = ("MODEL", "--output", "--calibration", "--evaluation")
"""Options whose value is text even if it looks like a number: `--output 64`."""


def load_recipe(path: str | Path) -> Recipe:
    """Reads a recipe file: YAML 1.2 in UTF-8, whatever the locale.

    Raises:
        UsageError: there is no such file.
        RecipeError: everything that is wrong with the file, each with line, column and key path.
    """
    file = str(path)
    text = _decode(_read(Path(path)), file)
    try:
        document = read_document(text)
    except NotYamlError as error:
        raise RecipeError([Problem(file, *error.position, "", error.message)]) from error
    return _check(document, file)


def recipe_from_options(options: Mapping[str, Any]) -> Recipe:
    """The recipe that the options of a command stand for.

    Args:
        options: values by the names in OPTIONS; None means that the option was not given. `--evaluate` and
            `--bench` are True (on, with defaults) or False (off). Numbers may be text, as in a shell.

    Raises:
        UsageError: one line for every fault, each begins with the option.
        KeyError: a name that OPTIONS lacks.
    """
    given = {name: value for name, value in options.items() if value is not None}
    origin = Origin(options={path: name for name, path in OPTIONS.items()} | dict(_GPTQ_NAMES))
    switches = {OPTIONS[name][0]: given.pop(name) for name in _SWITCHES if name in given}
    tree: dict[Any, Any] = {"version": 1} | {section: {} for section, on in switches.items() if on}
    off = {section for section, on in switches.items() if not on}
    faults: list[Fault] = []
    for name, value in given.items():
        path = OPTIONS[name]
        if path[0] in off:
            faults.append((path, f"has no effect together with --no-{path[0]}: leave one of them out"))
        elif name == "--override" and isinstance(value, list):
            _put(tree, path, _overrides(value, path, faults))
        elif name == "--gptq" and isinstance(value, list):
            _put(tree, path, _named_values(value, path, faults))
        else:
            _put(tree, path, scalar(value) if isinstance(value, str) and name not in _TEXT else value)
    try:
        recipe = Recipe.model_validate(_lists(tree) | dict.fromkeys(off)).traced(origin)
    except ValidationError as error:
        raise origin.error(faults + describe(error)[0]) from error
    if faults:
        raise origin.error(faults)
    return recipe


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a recipe file", hint=_files_in(path))
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UsageError(f"there is no recipe file {path}", hint=_files_in(path.parent)) from error
    except OSError as error:
        raise UsageError(f"the recipe file {path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_BYTES} bytes: this is no recipe")
    return data


def _files_in(folder: Path) -> str | None:
    found = sorted(str(file) for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern))
    return f"recipe files there: {', '.join(found[:8])}" if found else None


def _decode(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8").removeprefix("\ufeff")
        message = f"byte {data[error.start]:#04x} at position {error.start} is not UTF-8: save the file as UTF-8"
        raise RecipeError([Problem(file, *position_at(before, len(before)), "", message)]) from error


def _check(document: Document, file: str) -> Recipe:
    keys = ", ".join(Recipe.model_fields)
    if not isinstance(document.value, dict):
        message = (
            f"the file is empty: a recipe is a map with the keys {keys}"
            if document.value is None
            else f"a recipe is a map with the keys {keys}, not {shown(document.value)}"
        )
        raise Origin(file, document.places).error([((), message)])
    origin = Origin(file, document.places)
    problems = [Problem(file, *position, path, message) for position, path, message in document.key_faults]
    try:
        recipe = Recipe.model_validate(document.value)
    except ValidationError as error:
        problems.extend(origin.problems(*describe(error)))
        raise RecipeError(in_order(problems)) from error
    if problems:
        raise RecipeError(in_order(problems))
    return recipe.traced(origin)


def _put(tree: dict[Any, Any], path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _overrides(texts: list[Any], path: KeyPath, faults: list[Fault]) -> list[dict[str, Any]]:
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


def _named_values(texts: list[Any], path: KeyPath, faults: list[Fault]) -> dict[str, Any]:
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


def _lists(tree: dict[Any, Any]) -> dict[Any, Any]:
    """The steps, collected by index, as a list. Without any step option the target is what is missing."""
    steps = tree.get("steps", {0: {"quantize": {}}})
    return {**tree, "steps": list(steps.values())}
