"""`compress report PATH`: shows a report that an earlier run left, in any of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from compress.cli.boundary import Done
from compress.cli.options import Json, Quiet, Verbose, finish
from compress.cli.results import OutputFile, show_or_write
from compress.cli.terminal import Terminal
from compress.errors import UsageError


def report(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="report.json, the folder it is in, or the output folder of a run.")
    ],
    format: Annotated[
        Literal["text", "md", "json", "html", "junit", "metrics"], typer.Option(help="What to make of it.")
    ] = "text",
    output: OutputFile = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show a report again, or turn it into Markdown, HTML, JUnit or flat metrics.

    The exit code is that of the report's verdict, as it was at the end of the run: 0, 3, 4 or 8.
    """
    terminal = Terminal(quiet=quiet, verbose=verbose > 0, json=json)

    def command() -> Done:
        from compress.report.read import read_report, report_file
        from compress.report.render import FORMATS
        from compress.report.text import report_text

        found = read_report(path)
        if output is not None and Path(output).resolve() == report_file(path).resolve():
            raise UsageError(f"{output}: is the report itself.", hint="Give another file with -o.")
        shown: Any = report_text(found, report_path=path) if format == "text" else FORMATS[format].render(found)
        show_or_write(terminal, shown, output)
        return Done(
            exit_code=found.verdict.exit_code,
            output=found.output,
            report=str(report_file(path)),
            verdict=found.verdict.model_dump(mode="json"),
            measurements=[part.model_dump(mode="json") for part in found.measurements],
        )

    finish(terminal, command)
