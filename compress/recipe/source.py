"""Recipes from YAML files."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from compress.errors import Problem, RecipeError, UsageError
from compress.recipe.document import Document, NotYamlError, position_at, read_document
from compress.recipe.origin import Origin, in_order
from compress.recipe.schema import Recipe
from compress.recipe.sentences import describe
from compress.recipe.words import shown

_MAX_BYTES = 1_000_000
"""A larger file is something else, perhaps the model."""


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
        problems.extend(origin.problems(*describe(error, Recipe)))
        raise RecipeError(in_order(problems)) from error
    if problems:
        raise RecipeError(in_order(problems))
    return recipe.traced(origin)
