"""The command line: one file per command, composed here."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from itertools import takewhile
from typing import Annotated

import typer

from compress import __version__
from compress.cli.bench import bench
from compress.cli.boundary import Failure, emit_failure, fail
from compress.cli.compare import compare
from compress.cli.eval import evaluate
from compress.cli.init import init
from compress.cli.options import Json, Quiet, Verbose, finish
from compress.cli.plan import plan
from compress.cli.prune import prune
from compress.cli.quantize import quantize
from compress.cli.report import report
from compress.cli.run import run
from compress.cli.schema import schema
from compress.cli.terminal import Terminal, results_written
from compress.errors import EXIT_USAGE, MissingResourceError

EXIT_CODES = (
    "Exit codes: 0 done, every gate passed; 1 internal error; 2 usage or recipe; 3 a gate FAILED; "
    "4 a gate is INCONCLUSIVE; 7 --resume is refused; 8 the machine is too noisy for --precision; "
    "9 missing model, data, extra, memory or disk; 10 broken result; 130 interrupted."
)

app = typer.Typer(
    name="compress",
    help="Make a Hugging Face model smaller, prove that it still works, and gate it in CI.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"compress {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Make a Hugging Face model smaller, prove that it still works, and gate it in CI."""


def doctor(json: Json = False, quiet: Quiet = False, verbose: Verbose = 0) -> None:
    """Show what this machine and this Python can write, load and run."""
    terminal = Terminal(quiet=quiet, verbose=verbose > 0, json=json)

    def command() -> object:
        from compress.cli.doctor import doctor as look

        return look(terminal)

    finish(terminal, command)


app.command("eval", epilog=EXIT_CODES)(evaluate)
for function in (quantize, prune, run, plan, bench, init, schema, report, compare, doctor):
    app.command(epilog=EXIT_CODES)(function)


def start(arguments: Sequence[str]) -> int:
    """Runs the command line and returns its exit code, also for what never reaches a command: a wrong option, --help.

    With `--json` a wrong option too gives one object on stdout.
    """
    terminal = Terminal(json="--json" in takewhile(lambda word: word != "--", arguments))
    try:
        with results_written(sys.stdout):
            return app(args=list(arguments), standalone_mode=False) or 0
    except MissingResourceError as error:
        return fail(terminal, Failure(error.exit_code, type(error).__name__, error.message, error.hint))
    except Exception as error:  # typer does not export the class of what it shows
        describe, show = getattr(error, "format_message", None), getattr(error, "show", None)
        if describe is None or show is None:
            raise
        with redirect_stderr(io.StringIO()) as said:
            show()
        terminal.say(said.getvalue().rstrip())
        return emit_failure(terminal, Failure(EXIT_USAGE, "UsageError", describe(), "see `compress COMMAND --help`"))
