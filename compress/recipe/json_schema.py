"""The JSON Schema of a recipe, for editors: completion, descriptions, marks under mistakes."""

from __future__ import annotations

from typing import Any

from compress.recipe.schema import Recipe


def recipe_json_schema() -> dict[str, Any]:
    """Draft 2020-12. What follows from several values together is checked by `load_recipe` only."""
    schema = Recipe.model_json_schema(mode="validation")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:compress:recipe:1",
        "title": "Recipe of compress, version 1",
    }
    return head | {key: value for key, value in _on_one_line(schema).items() if key != "title"}


def _on_one_line(value: Any) -> Any:
    """Descriptions come from docstrings, whose line breaks mean nothing."""
    if isinstance(value, list):
        return [_on_one_line(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    described = {key: _on_one_line(inner) for key, inner in value.items()}
    if isinstance(described.get("description"), str):
        described["description"] = " ".join(described["description"].split())
    return described
