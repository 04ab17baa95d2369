"""`compress init MODEL`: a commented recipe that fits a model, and the CI job that runs it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from compress.cli.boundary import Done
from compress.cli.options import Json, Quiet, Verbose, finish
from compress.cli.terminal import Terminal
from compress.scheme import TARGETS

if TYPE_CHECKING:
    from compress.starter.start import Started


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of the model, hub id, or hub id@revision.")],
    recipe: Annotated[
        str, typer.Option("--recipe", "-o", metavar="FILE", help="The recipe to write.")
    ] = "compress.yaml",
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help=f"One of {', '.join(TARGETS)}.  [default: int4; int8 for encoders]"),
    ] = None,
    ci: Annotated[Literal["github", "gitlab", "none"], typer.Option(help="Whose job to write beside it.")] = "github",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Write a commented recipe for a model and a CI job that runs it. Reads no weights, overwrites nothing."""
    terminal = Terminal(quiet=quiet, verbose=verbose > 0, json=json)

    def command() -> Done:
        from compress.starter.start import start

        started = start(model, Path(recipe).expanduser(), target, None if ci == "none" else ci)
        if not json:
            terminal.raw(text(started))
        return Done(more={"init": data(started)})

    finish(terminal, command)


def text(started: Started) -> str:
    """What was written and how to go on; paths as words of a shell."""
    lines = [f"wrote {word(file)}" for file in started.files]
    lines += [f"to do: {note}" for note in started.notes]
    return "\n".join([*lines, "next:", *(f"  {line}" for line in following(started))])


def data(started: Started) -> dict[str, object]:
    """The same for `--json`."""
    return {
        "recipe": str(started.recipe),
        "workflow": None if started.workflow is None else str(started.workflow),
        "written": [str(file) for file in started.files],
        "target": started.target,
        "to_do": list(started.notes),
        "next": following(started),
    }


def following(started: Started) -> list[str]:
    """The next two commands."""
    separator = "-- " if str(started.recipe).startswith("-") else ""
    return [f"compress {command} {separator}{word(started.recipe)}" for command in ("plan", "run")]


def word(path: Path) -> str:
    r"""A path as a word of a shell; one that cannot be printed in bash's form, $'\x1b'."""
    name = str(path)
    if name.isprintable():
        return shlex.quote(name)
    escaped = name.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(letter if letter.isprintable() else _escape(ord(letter)) for letter in escaped) + "'"


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
