"""The only place that turns an exception into an exit code."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from compress import __version__
from compress.cli.terminal import Terminal
from compress.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_MISSING_RESOURCE,
    EXIT_OK,
    EXIT_USAGE,
    CompressError,
    RecipeError,
)

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
OUT_OF_MEMORY = ("can't allocate memory", "out of memory")
"""How torch words it: on the CPU a plain RuntimeError, on a GPU a subclass named OutOfMemoryError."""


@dataclass(frozen=True)
class Done:
    """What a command that came to its end has to say.

    Attributes:
        output, report: the folder of the result and its report.json, as paths.
        verdict: outcome, headline, exit code and gates, as in report.json.
        more: further keys for `--json`, for commands that answer something else (`doctor`, `plan`).
    """

    exit_code: int = EXIT_OK
    output: str | None = None
    report: str | None = None
    verdict: Mapping[str, Any] | None = None
    measurements: Sequence[Mapping[str, Any]] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """An exception as the user sees it."""

    exit_code: int
    kind: str
    message: str
    hint: str | None = None
    problems: tuple[Mapping[str, Any], ...] = ()


def run_guarded(terminal: Terminal, function: Callable[[], Done]) -> int:
    """Runs a command and returns its exit code; with `--json` also writes the one object on stdout.

    SIGTERM ends a command as Ctrl-C does, so that locks and half-written folders are cleaned up.
    """
    with terminal.reserved_stdout(), terminate_as_interrupt():
        try:
            done = function()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary
            failure = failure_of(error)
            terminal.fail(failure.message, hint=failure.hint, error=error)
            if terminal.json:
                terminal.emit(json_object(Done(exit_code=failure.exit_code), failure))
            return failure.exit_code
        if terminal.json:
            terminal.emit(json_object(done, None))
        return done.exit_code


def json_object(done: Done, failure: Failure | None) -> dict[str, Any]:
    """The object of `--json`; scripts rely on its keys."""
    error: dict[str, Any] | None = None
    if failure is not None:
        error = {"kind": failure.kind, "message": failure.message, "hint": failure.hint}
        if failure.problems:
            error["problems"] = list(failure.problems)
    return {
        "output": done.output,
        "report": done.report,
        "verdict": done.verdict,
        "exit_code": done.exit_code,
        "measurements": list(done.measurements),
        "error": error,
        **done.more,
    }


def failure_of(error: BaseException) -> Failure:
    """What to tell about `error`, and the exit code."""
    kind = type(error).__name__
    if isinstance(error, RecipeError):
        return Failure(error.exit_code, kind, error.message, error.hint, tuple(vars(p) for p in error.problems))
    if isinstance(error, CompressError):
        return Failure(error.exit_code, kind, error.message, error.hint)
    if isinstance(error, KeyboardInterrupt):
        return Failure(EXIT_INTERRUPTED, kind, "interrupted")
    if is_out_of_memory(error):
        return Failure(
            EXIT_MISSING_RESOURCE,
            kind,
            f"not enough memory: {first_line(error)}",
            "close other programs, use a machine with more memory, or fewer --samples and a shorter --length",
        )
    if isinstance(error, OSError) and error.errno in DISK_FULL | NOT_ALLOWED:
        return operating_system_failure(error)
    if isinstance(error, UnicodeEncodeError) and error.encoding == sys.getfilesystemencoding():
        return Failure(
            EXIT_USAGE,
            kind,
            f"{error.object!r} cannot be a file name under this locale, whose encoding is {error.encoding}",
            "set PYTHONUTF8=1, or a UTF-8 locale such as LC_ALL=C.UTF-8",
        )
    return Failure(
        EXIT_INTERNAL,
        kind,
        f"this is a bug in compress: {kind}: {first_line(error)}",
        f"run it again with -v and report the traceback together with the command, `compress doctor` and the "
        f"recipe (compress {__version__}, Python {sys.version.split()[0]})",
    )


def operating_system_failure(error: OSError) -> Failure:
    where = f"{error.filename}: " if error.filename else ""
    full = error.errno in DISK_FULL
    hint = (
        "free some space, or put the output (-o) and $COMPRESS_CACHE on a larger disk"
        if full
        else "check the permissions of this path, or choose another output (-o)"
    )
    return Failure(EXIT_MISSING_RESOURCE, type(error).__name__, f"{where}{error.strerror}", hint)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no further message")


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """While open, SIGTERM raises KeyboardInterrupt in the main thread."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
