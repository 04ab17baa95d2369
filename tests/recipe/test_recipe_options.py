from __future__ import annotations

from typing import Any

import pytest

from compress.errors import RecipeError, UsageError
from compress.recipe.bench import Bench
from compress.recipe.evaluate import Task
from compress.recipe.options import OPTIONS, recipe_from_options
from compress.recipe.quantize import Gptq, Override
from compress.recipe.schema import Recipe

GIVEN = {"MODEL": "m", "--target": "int4"}

EXAMPLES: dict[str, tuple[Any, Any]] = {
    "MODEL": ("7", "7"),
    "--output": ("64", "64"),
    "--seed": ("3", 3),
    "--target": ("int8-weight", "int8-weight"),
    "--algorithm": ("rtn", "rtn"),
    "--format": ("gptq", "gptq"),
    "--group-size": ("64", 64),
    "--symmetric": (False, False),
    "--dequantize": (True, True),
    "--skip": (["*.q_proj"], ("*.q_proj",)),
    "--override": (
        ["*.down_proj=int8-weight", "a=b=int4:64"],
        (Override(layers="*.down_proj", target="int8-weight"), Override(layers="a=b", target="int4", group_size=64)),
    ),
    "--damping": ("1e-4", 1e-4),
    "--gptq": (["asymmetric=false", "local_search=0"], Gptq(asymmetric=False, local_search=0)),
    "--max-fallback": ("2.5%", 0.025),
    "--refine": ("100", 100),
    "--smooth": (False, False),
    "--max-shard-size": ("1MB", 10**6),
    "--calibration": ("a.txt", "a.txt"),
    "--samples": ("16", 16),
    "--length": ("64", 64),
    "--batch-size": ("4", 4),
    "--evaluation": ("b.txt", "b.txt"),
    "--evaluation-tokens": ("2k", 2000),
    "--evaluation-length": ("64", 64),
    "--task": (["next_sentence", "t/a b.jsonl"], (Task(name="next_sentence"), Task(name="a_b", source="t/a b.jsonl"))),
    "--task-items": ("2k", 2000),
    "--prompt": ("32", (32,)),
    "--new-tokens": ("8", (8,)),
    "--batch": ("1,4", (1, 4)),
    "--bench-budget": ("5s", 5.0),
    "--precision": ("2%", 0.02),
    "--engine": ("auto", "auto"),
    "--report": (["md"], ("md",)),
}


def reach(recipe: Recipe, path: tuple[str | int, ...]) -> Any:
    value: Any = recipe
    for part in path:
        value = value[part] if isinstance(part, int) else getattr(value, part)
    return value


def message(options: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        recipe_from_options(GIVEN | options)
    assert not isinstance(caught.value, RecipeError)
    return caught.value.message


def test_the_examples_are_all_options() -> None:
    assert set(EXAMPLES) | {"--evaluate", "--bench", "--gate"} == set(OPTIONS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_option_sets_its_value(name: str) -> None:
    given, value = EXAMPLES[name]
    assert reach(recipe_from_options(GIVEN | {name: given}), OPTIONS[name]) == value


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_option_is_named_by_its_error(name: str) -> None:
    assert message({name: object()}).startswith(f"{name}: must be ")


def test_options_that_were_not_given_leave_the_defaults() -> None:
    plain = Recipe.model_validate({"version": 1, "model": "m", "steps": [{"quantize": {"target": "int4"}}]})
    assert recipe_from_options(GIVEN | dict.fromkeys(EXAMPLES.keys() - GIVEN.keys())) == plain


def test_switches() -> None:
    recipe = recipe_from_options(GIVEN | {"--bench": True, "--evaluate": False})
    assert (recipe.bench, recipe.evaluate) == (Bench(), None)
    assert recipe_from_options(GIVEN | {"--bench": False}).bench is None


def test_an_option_of_a_section_that_is_off() -> None:
    assert message({"--bench": False, "--batch": 2, "--samples": 0}) == (
        "--batch: has no effect together with --no-bench: leave one of them out\n"
        "--samples: must be a whole number of at least 1 and of at most 2147483647, not `0`"
    )


def test_gates_have_no_line() -> None:
    (gate,) = recipe_from_options(GIVEN | {"--gate": ["kl.mean <= 0.1"]}).gates
    assert gate.line is None


def test_all_problems_at_once() -> None:
    found = message({"--group-size": "0", "--format": "zip", "--gate": ["kl.maen <= 1", "latency.tpot <= 3ms"]})
    assert [line.split(": ")[0] for line in found.split("\n")] == ["--format", "--group-size", "--gate", "--gate"]


def test_what_is_missing() -> None:
    with pytest.raises(UsageError) as caught:
        recipe_from_options({})
    assert [line.split(".")[0] for line in caught.value.message.split("\n")] == [
        "MODEL: is missing",
        "--target: is missing",
    ]


def test_faults_found_later_name_the_option() -> None:
    recipe = recipe_from_options(GIVEN | {"--skip": ["nothing*"]})
    assert str(recipe.error([(("steps", 0, "quantize", "skip", 0), "matches no layer")])) == (
        "--skip: matches no layer"
    )
