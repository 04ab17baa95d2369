"""The command line: one file per command, composed here."""

from __future__ import annotations

from typing import Annotated

import typer

from compress import __version__
from compress.cli.options import Json, Quiet, Verbose, finish
from compress.cli.plan import plan
from compress.cli.quantize import quantize
from compress.cli.run import run
from compress.cli.schema import schema
from compress.cli.terminal import Terminal

EXIT_CODES = (
    "Exit codes: 0 done, every gate passed; 1 internal error; 2 usage or recipe; 3 a gate FAILED; "
    "4 a gate is INCONCLUSIVE; 9 missing model, data, extra, memory or disk; 10 the result is broken; 130 interrupted."
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


for function in (quantize, run, plan, schema, doctor):
    app.command(epilog=EXIT_CODES)(function)
