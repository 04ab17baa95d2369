"""Every field of a recipe, found through the JSON Schema: a new field is covered without a new test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from compress.errors import Problem, RecipeError
from compress.metrics import METRICS
from compress.recipe.bench import Bench
from compress.recipe.json_schema import recipe_json_schema
from compress.recipe.measured import MEASURED_BY
from compress.recipe.source import load_recipe

ROOT = Path(__file__).parents[2]
SCHEMA = recipe_json_schema()
REQUIRED = {
    "version": "1",
    "model": "m",
    "steps[1].quantize.target": "int4",
    "steps[0].prune.keep.ffn": "0.75",
    "evaluate.tasks[0].name": "next_sentence",
    "steps[1].quantize.overrides[0].layers": '"*.down_proj"',
    "steps[1].quantize.overrides[0].target": "int8-weight",
}
WRONG = {
    "string": '"7"',
    "integer": "7",
    "number": "7.5",
    "boolean": "true",
    "array": "[[7]]",
    "object": "{x: 7}",
    "null": "null",
}


def options(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a schema, references resolved."""
    if "$ref" in schema:
        yield from options(SCHEMA["$defs"][schema["$ref"].split("/")[-1]])
    elif "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from options(option)
    else:
        yield schema


def types(schema: dict[str, Any]) -> set[str]:
    names = {str: "string", int: "integer"}
    found: set[str] = set()
    for option in options(schema):
        found |= {option["type"]} if "type" in option else {names[type(value)] for value in option["enum"]}
    return found | ({"integer"} if "number" in found else set())


def section(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The properties of the map that a schema allows."""
    return next((option["properties"] for option in options(schema) if "properties" in option), None)


@dataclass
class Sheet:
    """A recipe with every key on its own line."""

    replaced: dict[str, str]
    beside: str | None = None
    lines: list[str] = field(default_factory=list)
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    values: dict[str, tuple[int, int]] = field(default_factory=dict)

    def map(self, properties: dict[str, Any], above: str, indent: int, first: str = "") -> None:
        for name, schema in properties.items():
            path = f"{above}.{name}".removeprefix(".")
            head = (first or " " * indent) + f"{name}:"
            first = ""
            self.entry(path, schema, head, indent)
            if path == self.beside:
                self.lines.append(" " * indent + f"{name}x: 1")
                self.keys[path + "x"] = (len(self.lines), indent + 1)

    def entry(self, path: str, schema: dict[str, Any], head: str, indent: int) -> None:
        self.keys[path] = (len(self.lines) + 1, indent + 1)
        self.values[path] = (len(self.lines) + 1, len(head) + 2)
        inner = section(schema)
        items = section(next(options(schema)).get("items", {}))
        if path in self.replaced or not (inner or items):
            self.lines.append(f"{head} {self.replaced.get(path) or valid(path, schema)}")
            return
        self.lines.append(head)
        if inner:
            self.map(inner, path, indent + 2)
        elif items:
            for index, item in enumerate(alternatives(path, items)):
                self.map(item, f"{path}[{index}]", indent + 4, first=" " * (indent + 2) + "- ")


def alternatives(path: str, properties: dict[str, Any]) -> list[dict[str, Any]]:
    """The properties of the items of a list that together have every key: a step has one key each."""
    return [{name: schema} for name, schema in properties.items()] if path == "steps" else [properties]


def valid(path: str, schema: dict[str, Any]) -> str:
    return REQUIRED.get(path) or json.dumps(schema["default"])


def sheet(replaced: dict[str, str] | None = None, beside: str | None = None) -> Sheet:
    made = Sheet(replaced or {}, beside)
    made.map(SCHEMA["properties"], "", 0)
    return made


def schemas(properties: dict[str, Any], above: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in properties.items():
        path = f"{above}.{name}".removeprefix(".")
        yield path, schema
        inner = section(schema)
        items = section(next(options(schema)).get("items", {}))
        if inner:
            yield from schemas(inner, path)
        for index, item in enumerate(alternatives(path, items or {})):
            yield from schemas(item, f"{path}[{index}]")


FIELDS = dict(schemas(SCHEMA["properties"]))


def problems(folder: Path, made: Sheet) -> list[Problem]:
    path = folder / "recipe.yaml"
    path.write_text("\n".join(made.lines) + "\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert all(problem.file == str(path) for problem in caught.value.problems)
    return list(caught.value.problems)


def test_the_sheet_has_every_field_and_is_valid(tmp_path: Path) -> None:
    made = sheet()
    path = tmp_path / "recipe.yaml"
    path.write_text("\n".join(made.lines) + "\n", encoding="utf-8")
    assert load_recipe(path).bench == Bench()
    assert set(made.keys) == set(FIELDS)
    assert {"steps[1].quantize.damping", "evaluate.fidelity.tokens", "bench.budget"} <= set(FIELDS)


@pytest.mark.parametrize("path", FIELDS)
def test_a_wrong_type_is_reported_at_the_value(tmp_path: Path, path: str) -> None:
    wrong = set(WRONG) - types(FIELDS[path]) - ({"number"} if "number" in types(FIELDS[path]) else set())
    assert len(wrong) >= 3
    for kind in wrong:
        made = sheet({path: WRONG[kind]})
        (problem,) = problems(tmp_path, made)
        assert (problem.line, problem.column, problem.path) == (*made.values[path], path), kind
        assert problem.message.startswith("must be "), kind
        assert ", not " in problem.message


@pytest.mark.parametrize("path", [path for path in FIELDS if "array" in types(FIELDS[path])])
def test_a_wrong_item_is_reported_at_the_item(tmp_path: Path, path: str) -> None:
    made = sheet({path: "[[7], [7]]"})
    line, column = made.values[path]
    first, second = problems(tmp_path, made)
    assert (first.line, first.column, first.path) == (line, column + 1, f"{path}[0]")
    assert (second.line, second.column, second.path) == (line, column + 6, f"{path}[1]")


@pytest.mark.parametrize("path", FIELDS)
def test_an_unknown_neighbour_is_reported_at_the_key(tmp_path: Path, path: str) -> None:
    made = sheet(beside=path)
    (problem,) = problems(tmp_path, made)
    name = path.split(".")[-1]
    assert (problem.line, problem.column, problem.path) == (*made.keys[path + "x"], path + "x")
    assert problem.message.startswith("unknown ")
    assert f"`{name}x` (did you mean `{name}`?)" in problem.message


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_is_described(path: str) -> None:
    described = [FIELDS[path], *options(FIELDS[path])]
    assert any(schema.get("description", "").endswith(".") for schema in described)


def test_every_metric_knows_what_measures_it() -> None:
    assert {metric.split(".")[0] for metric in METRICS} == set(MEASURED_BY)
    for path in MEASURED_BY.values():
        assert not path or ".".join(path) in FIELDS


def test_the_schema_beside_the_recipes_is_current() -> None:
    text = (ROOT / "recipes" / "recipe.schema.json").read_text(encoding="utf-8")
    assert text == json.dumps(SCHEMA, indent=2) + "\n"
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_the_recipes_of_the_repository_load(path: Path) -> None:
    recipe = load_recipe(path)
    first, second, *_ = path.read_text(encoding="utf-8").splitlines()
    assert first == "# yaml-language-server: $schema=./recipe.schema.json"
    assert second.startswith("# ")
    assert recipe.gates
    assert all(not gate.metric.startswith("latency.") for gate in recipe.gates)
