"""Results that go to stdout or, with -o, to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli.terminal import Terminal, plain_text
from compress.errors import MissingResourceError, UsageError

OutputFile = Annotated[
    str | None, typer.Option("-o", "--output", metavar="FILE", help="Write it to this file instead of stdout.")
]


def show_or_write(terminal: Terminal, result: Any, output: str | None) -> None:
    """Shows a result, or writes it to the file that the user asked for; `result` is text, or what rich can show.

    Raises:
        UsageError: the file has a name that cannot be.
        MissingResourceError: it cannot be written.
    """
    if output is not None:
        write_file(output, result if isinstance(result, str) else plain_text(result))
        terminal.say(f"written: {output}")
    elif not isinstance(result, str):
        terminal.result(result)
    elif not terminal.json:
        terminal.raw(result)


def write_file(output: str, text: str) -> None:
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MissingResourceError(
            f"{output}: cannot be written: {error.strerror}.", hint="Give another file with -o."
        ) from error
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"{output}: cannot be written: {error}.", hint="Give another file with -o.") from None
