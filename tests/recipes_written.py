"""Recipe files for tests: written, read, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.errors import EXIT_USAGE, RecipeError
from compress.recipe.quantize import Quantize
from compress.recipe.schema import Recipe
from compress.recipe.source import load_recipe

GOOD = "version: 1\nmodel: m\nsteps:\n  - quantize: {target: int4}\n"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def load(folder: Path, text: str | bytes) -> Recipe:
    return load_recipe(write(folder, text))


def problems(folder: Path, text: str | bytes) -> list[str]:
    """Each problem as "line:column: path: message"."""
    path = write(folder, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.exit_code == EXIT_USAGE
    lines = caught.value.message.split("\n")
    assert all(line.startswith(f"{path}:") for line in lines)
    assert len(lines) == len(caught.value.problems)
    places = [(problem.line, problem.column) for problem in caught.value.problems]
    assert places == sorted(places)
    return [line.removeprefix(f"{path}:") for line in lines]


def quantize(settings: str) -> str:
    return f"version: 1\nmodel: m\nsteps:\n  - quantize:\n      target: int4\n{settings}"


HEAD = "version: 1\nmodel: ./m\nsteps:\n  - quantize:\n"


def step(folder: Path, lines: str) -> Quantize:
    path = folder / "recipe.yaml"
    path.write_text(HEAD + "".join(f"      {line}\n" for line in lines.splitlines()))
    return load_recipe(path).steps[0].quantize


def faults(folder: Path, lines: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        step(folder, lines)
    return [str(problem).removeprefix(f"{folder}/recipe.yaml:") for problem in caught.value.problems]
