"""`compress run RECIPE`: a recipe from a file."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from compress.cli.options import (
    Device,
    Json,
    Memory,
    Overwrite,
    Quiet,
    Resume,
    TrustRemoteCode,
    Verbose,
    finish,
    run_recipe,
)
from compress.cli.terminal import Terminal


def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file; `compress schema` describes it.")],
    device: Device = "auto",
    memory: Memory = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Run a recipe: compress, prove, measure, judge, report."""
    terminal = Terminal(quiet=quiet, verbose=verbose > 0, json=json)

    def load() -> Any:
        from compress.recipe.source import load_recipe

        return load_recipe(recipe)

    finish(
        terminal,
        lambda: run_recipe(
            terminal,
            load,
            overwrite=overwrite,
            resume=resume,
            device=device,
            memory=memory,
            trust_remote_code=trust_remote_code,
        ),
    )
