"""`compress schema`: the JSON Schema of recipes, for editors."""

from __future__ import annotations

import json as jsonlib

from compress.cli.boundary import Done
from compress.cli.options import Json, finish
from compress.cli.terminal import Terminal


def schema(json: Json = False) -> None:
    """Print the JSON Schema of recipes; it is JSON with and without --json."""
    del json
    terminal = Terminal()

    def command() -> Done:
        from compress.recipe.json_schema import recipe_json_schema

        terminal.raw(jsonlib.dumps(recipe_json_schema(), indent=2, ensure_ascii=False))
        return Done()

    finish(terminal, command)
