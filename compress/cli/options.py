"""Options that commands share, and how a command ends."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from compress.cli.boundary import Done, run_guarded
from compress.cli.terminal import Terminal

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but results and errors.")]
Verbose = Annotated[int, typer.Option("-v", "--verbose", count=True, help="Show tracebacks with errors.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output folder, if compress wrote it and nothing was added.")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute. auto: a GPU if torch sees one.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where an interrupted run of the same output stopped; else start it.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run and copy the Python files of the model folder.")
]


def finish(terminal: Terminal, command: Callable[[], Any]) -> None:
    """Runs a command behind the error boundary and exits with its code."""
    raise typer.Exit(run_guarded(terminal, command))


def typed_command() -> str:
    """The command as it was typed, for the report."""
    return shlex.join(["compress", *sys.argv[1:]])


def run_recipe(
    terminal: Terminal,
    load: Callable[[], Any],
    *,
    overwrite: bool,
    resume: bool,
    device: str,
    trust_remote_code: bool,
) -> Done:
    """Runs the recipe that `load` gives and shows its report."""
    recipe = load()
    from compress.pipeline.job import Options
    from compress.pipeline.run import run
    from compress.report.text import report_text

    options = Options(
        overwrite=overwrite,
        device=device,
        trust_remote_code=trust_remote_code,
        resume=resume,
        command=typed_command(),
    )
    result = run(recipe, options, terminal)
    report_file = None if result.report_file is None else str(result.report_file)
    terminal.result(report_text(result.report, report_path=report_file))
    verdict = result.report.verdict.model_dump(mode="json")
    return Done(
        exit_code=result.report.verdict.exit_code,
        output=str(result.output),
        report=report_file,
        verdict=verdict,
        measurements=[part.model_dump(mode="json") for part in result.report.measurements],
    )
