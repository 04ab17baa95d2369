"""The one place that writes to the terminal: results to stdout, everything else to stderr."""

from __future__ import annotations

import json as jsonlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from compress.errors import MissingResourceError
from compress.progress import Advance
from compress.report.clean import defused, defused_json, visible

FILE_WIDTH = 100
"""Columns of a result that is written to a file."""

SHORT_SECONDS = 2.0
"""A phase shorter than this leaves no trace in a live terminal."""

PLAIN_SECONDS = 10.0
PLAIN_SHARE = 0.1
"""Without a live terminal a line appears when both this much time and this share of the work have gone by,
or, in long phases, after six times the time."""


class Terminal:
    """What a command may show. Implements `compress.progress.Progress`.

    Args:
        quiet: nothing but results and errors.
        verbose: tracebacks with errors.
        json: one JSON object on stdout and nothing else there.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False, json: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.json = json
        self._stdout = console(sys.stdout)
        self._stderr = console(sys.stderr)
        self._bars: Progress | None = None
        self._open_phases = 0
        self._lock = threading.Lock()

    def result(self, renderable: RenderableType) -> None:
        """Shows a result on stdout; with `--json` nothing, as the object says it all.

        Raises:
            MissingResourceError: stdout takes nothing more, for example because it is a file on a full disk.
        """
        if not self.json:
            with results_written(self._stdout.file):
                self._stdout.file.write(drawn(self._stdout, renderable))
                self._stdout.file.flush()

    def raw(self, text: str) -> None:
        """Writes text to stdout as it is, unwrapped: JSON, Markdown, a schema. Raises as `result` does."""
        with results_written(self._stdout.file):
            self._stdout.file.write(text if text.endswith("\n") else text + "\n")
            self._stdout.file.flush()

    def emit(self, data: Mapping[str, Any]) -> None:
        """Writes the one JSON object of `--json`. Raises as `result` does."""
        self.raw(defused_json(jsonlib.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)))

    def say(self, message: str) -> None:
        """One line on stderr, unless quiet."""
        if not self.quiet:
            self._talk(Text(harmless(message)))

    def fail(self, message: str, *, hint: str | None = None, error: BaseException | None = None) -> None:
        """One error on stderr: the message, the way out, and with -v where it came from."""
        if self.verbose and error is not None:
            self._talk(Text(harmless("".join(traceback.format_exception(error)).rstrip())))
        self._talk(Text.assemble(("error: ", "bold red"), harmless(message)))
        if hint:
            self._talk(Text.assemble(("hint: ", "bold"), harmless(hint)))

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[Advance]:
        """Shows a bar with the time left in a live terminal, else a line now and then; see `Progress`."""
        if self.quiet:
            yield lambda _amount: None
        elif self._stderr.is_terminal:
            with self._bar(name, total) as advance:
                yield advance
        else:
            with self._lines(name, total) as advance:
                yield advance

    @contextmanager
    def reserved_stdout(self) -> Iterator[None]:
        """Keeps stdout for results: what libraries and child processes print there goes to stderr."""
        try:
            out, err = sys.stdout.fileno(), sys.stderr.fileno()
        except (OSError, ValueError, AttributeError):
            with redirect_stdout(sys.stderr):
                yield
            return
        with talk_ignored(sys.stdout):
            sys.stdout.flush()
        kept = os.dup(out)
        before = self._stdout
        with os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors="backslashreplace") as stream:
            self._stdout = console(stream)
            os.dup2(err, out)
            try:
                yield
            finally:
                with talk_ignored(sys.stdout):
                    sys.stdout.flush()
                os.dup2(kept, out)
                self._stdout = before

    @contextmanager
    def _bar(self, name: str, total: float) -> Iterator[Advance]:
        bars = self._start_bars()
        task = bars.add_task(name, total=total, visible=False)

        def reveal() -> None:
            with suppress(KeyError):  # the phase has just ended
                bars.update(task, visible=True)

        show = threading.Timer(SHORT_SECONDS, reveal)
        show.daemon = True
        show.start()
        began = time.monotonic()
        try:
            yield lambda amount: bars.advance(task, amount)
        finally:
            show.cancel()
            with suppress(KeyError):
                bars.remove_task(task)
            self._stop_bars()
        took = time.monotonic() - began
        if took >= SHORT_SECONDS:
            self.say(f"{name}: done in {duration(took)}")

    def _start_bars(self) -> Progress:
        with self._lock:
            self._open_phases += 1
            if self._bars is None:
                self._bars = Progress(
                    SpinnerColumn(),
                    TextColumn("{task.description}", markup=False),
                    BarColumn(),
                    TaskProgressColumn(),
                    TimeElapsedColumn(),
                    TextColumn("left"),
                    TimeRemainingColumn(),
                    console=self._stderr,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=True,
                )
                with talk_ignored(self._stderr.file):
                    self._bars.start()
            return self._bars

    def _stop_bars(self) -> None:
        with self._lock:
            self._open_phases -= 1
            if self._open_phases == 0 and self._bars is not None:
                with talk_ignored(self._stderr.file):
                    self._bars.stop()
                self._bars = None

    @contextmanager
    def _lines(self, name: str, total: float) -> Iterator[Advance]:
        self.say(f"{name} ...")
        yield plain_advance(name, total, self.say, time.monotonic)

    def _talk(self, text: Text) -> None:
        with talk_ignored(self._stderr.file):
            self._stderr.print(text, soft_wrap=True, highlight=False)


def harmless(message: str) -> str:
    """A message that may quote what came from outside: nothing in it moves the cursor or speaks to a CI system."""
    return defused(visible(message))


def drawn(console: Console, renderable: RenderableType) -> str:
    """What `console` would print, commands to a CI system taken apart as its lines stand after wrapping."""
    with console.capture() as captured:
        console.print(renderable, markup=False, highlight=False)
    return defused(captured.get())


def plain_text(renderable: RenderableType) -> str:
    """The same for a file: without colour."""
    return drawn(Console(width=FILE_WIDTH, color_system=None, emoji=False), renderable)


def plain_advance(
    name: str, total: float, say: Callable[[str], None], clock: Callable[[], float]
) -> Callable[[float], None]:
    """An `advance` that says how far it is, rarely: see PLAIN_SECONDS and PLAIN_SHARE."""
    began = last_time = clock()
    done = last_done = 0.0

    def advance(amount: float) -> None:
        nonlocal done, last_time, last_done
        done += amount
        now, share = clock(), min(1.0, done / total) if total else 1.0
        waited = now - last_time
        if (
            last_done >= total
            or waited < PLAIN_SECONDS
            or (done - last_done < PLAIN_SHARE * total and waited < 6 * PLAIN_SECONDS)
        ):
            return
        left = (now - began) / share * (1 - share) if share else float("inf")
        tail = "" if left == float("inf") else f", about {duration(left)} left"
        say(f"{name}: {share:.0%}{tail}")
        last_time, last_done = now, done

    return advance


def duration(seconds: float) -> str:
    """`8 s`, `2 min 5 s`, `1 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class PatientConsole(Console):
    """A console that outlives its reader.

    Rich ends the program with code 1 when the pipe it writes to is closed (`| head`). Here the command runs to its
    end, the rest of the text goes nowhere, and the exit code stays the verdict's.
    """

    def on_broken_pipe(self) -> None:
        forget_reader(self.file)


def console(stream: TextIO) -> Console:
    """A console on `stream` that shows what its encoding lacks as an escape, never as a crash."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return PatientConsole(file=stream, emoji=False)


@contextmanager
def results_written(stream: IO[str]) -> Iterator[None]:
    """Writes in the block survive a reader that has gone, as those through a PatientConsole do.

    Raises:
        MissingResourceError: a write failed for another reason. Nothing more is written to `stream`.
    """
    try:
        yield
    except BrokenPipeError:
        forget_reader(stream)
    except OSError as error:
        forget_reader(stream)
        raise MissingResourceError(
            f"the result cannot be written to stdout: {error.strerror}",
            hint="send stdout to a place that has room; the files of the result are not touched by this",
        ) from error


@contextmanager
def talk_ignored(stream: IO[str]) -> Iterator[None]:
    """What the block says goes nowhere if `stream` takes it no more: it is no part of the result."""
    try:
        yield
    except OSError:
        forget_reader(stream)


def forget_reader(stream: IO[str]) -> None:
    """Points a stream that takes nothing more at the null device, and empties it there: nothing more is raised."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
