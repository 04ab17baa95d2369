"""`compress schema`: the JSON Schema of recipes, for editors, and of reports, for who reads them."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from compress.cli.boundary import Done
from compress.cli.options import Json, finish
from compress.cli.terminal import Terminal


def schema(
    report: Annotated[bool, typer.Option("--report", help="The schema of report.json instead of recipes.")] = False,
    json: Json = False,
) -> None:
    """Print the JSON Schema of recipes or reports; it is JSON with and without --json."""
    del json
    terminal = Terminal()

    def command() -> Done:
        from compress.recipe.json_schema import recipe_json_schema
        from compress.report.schema import report_json_schema

        found = report_json_schema() if report else recipe_json_schema()
        terminal.raw(jsonlib.dumps(found, indent=2, ensure_ascii=False))
        return Done()

    finish(terminal, command)
