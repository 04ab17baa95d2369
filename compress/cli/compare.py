"""`compress compare A B`: what changed between two reports."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from compress.cli.boundary import Done
from compress.cli.options import Json, Quiet, Verbose, finish
from compress.cli.results import OutputFile, show_or_write
from compress.cli.terminal import Terminal

PATH_HELP = "report.json, the folder it is in, or the output folder of a run."


def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=PATH_HELP)],
    after: Annotated[str, typer.Argument(metavar="AFTER", help=PATH_HELP)],
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC=VALUE", help="How much worse a metric may become, such as size=2MB; may be repeated."
        ),
    ] = None,
    format: Annotated[Literal["text", "md", "json"], typer.Option(help="How to show it.")] = "text",
    output: OutputFile = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Compare two reports, typically of two commits.

    Exit code 3 on a regression: a gate that fails and did not, or a figure that is worse by more than noise and
    tolerance. Exit code 4 where a gate that passed is INCONCLUSIVE now. Else 0, also if both fail alike. Times of two
    machines are not compared.
    """
    terminal = Terminal(quiet=quiet, verbose=verbose > 0, json=json)

    def command() -> Done:
        from compress.report.clean import visible
        from compress.report.comparison.compare import compare as compared
        from compress.report.comparison.compare import parse_tolerances
        from compress.report.comparison.text import compare_data, compare_json, compare_markdown, compare_text
        from compress.report.read import read_report, report_file

        allowed = parse_tolerances(tolerance or ())
        first, second = read_report(before), read_report(after)
        found = compared(first, second, paths=(visible(before), visible(after)), tolerances=allowed)
        forms: dict[str, Any] = {"text": compare_text, "md": compare_markdown, "json": compare_json}
        show_or_write(terminal, forms[format](found), output)
        return Done(
            exit_code=found.exit_code,
            output=second.output,
            report=str(report_file(after)),
            verdict=second.verdict.model_dump(mode="json"),
            more={"comparison": compare_data(found)},
        )

    finish(terminal, command)
