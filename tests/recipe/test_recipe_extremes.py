"""Values of a recipe that no machine can hold: an error with its place, never a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.errors import RecipeError, UsageError
from compress.recipe.options import recipe_from_options
from compress.recipe.source import load_recipe

HEX, LONG, NINES = "0x" + "f" * 5000, "9" * 5000, "9" * 390
TOP = [
    f"seed: {HEX}",
    f"seed: {LONG}",
    f"seed: {NINES}",
    f"seed: !!int {HEX}",
    "seed: 0o" + "7" * 6000,
    f"calibration: {{samples: {NINES}}}",
    "calibration: {samples: 2147483648}",
    f"evaluate: {{fidelity: {{tokens: {NINES}}}}}",
    "evaluate: {fidelity: {tokens: 1e999}}",
    "evaluate: {fidelity: {tokens: '1e999'}}",
    f"bench: {{budget: {NINES}}}",
    "bench: {budget: 1e300s}",
    r'"\ud800": 1',
    r'"\udc00\ud800": 1',
    r'output: "\udc00"',
]
INSIDE = ["max_shard_size: 1e999GB", f"group_size: {NINES}", f"group_size: {HEX}", f"damping: {NINES}"]


def recipe(folder: Path, *, top: str = "", inside: str = "") -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"version: 1\nmodel: m\nsteps:\n- quantize: {{target: int4, {inside}}}\n{top}\n")
    return path


@pytest.mark.parametrize("top", TOP, ids=lambda text: text[:20])
def test_at_the_top(top: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(tmp_path, top=top))
    assert {problem.line for problem in caught.value.problems} == {5}


@pytest.mark.parametrize("inside", INSIDE, ids=lambda text: text[:20])
def test_in_the_step(inside: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(tmp_path, inside=inside))
    assert {problem.line for problem in caught.value.problems} == {4}


def test_the_halves_of_a_character_in_json_are_one_character(tmp_path: Path) -> None:
    assert load_recipe(recipe(tmp_path, top=r'output: "\ud83d\ude00"')).output == "\U0001f600"


@pytest.mark.parametrize(
    ("option", "value"), [("--samples", int(NINES)), ("--seed", int(NINES)), ("--max-shard-size", "1e999GB")]
)
def test_as_an_option(option: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{option}: "):
        recipe_from_options({"MODEL": "m", "--target": "int4", option: value})
