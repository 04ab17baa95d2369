"""`compress plan RECIPE`: what would happen, from config and headers only."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.cli.boundary import Done
from compress.cli.options import Json, Memory, Quiet, Verbose, finish, parse_memory
from compress.cli.terminal import Terminal


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file; `compress schema` describes it.")],
    memory: Memory = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show what a recipe would do: every layer, exact bytes, memory and time. Reads no weights."""
    terminal = Terminal(quiet=quiet, verbose=verbose > 0, json=json)

    def command() -> Done:
        from compress.pipeline.run import plan_recipe
        from compress.pipeline.serving import planned_serving
        from compress.recipe.source import load_recipe
        from compress.report.plan_text import plan_data, plan_text

        made, guess = plan_recipe(load_recipe(recipe), parse_memory(memory))
        engines = planned_serving(made)
        terminal.result(plan_text(made, guess, engines))
        return Done(output=str(made.output), more={"plan": plan_data(made, guess, engines)})

    finish(terminal, command)
