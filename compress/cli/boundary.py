"""The only place that turns an exception into an exit code."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
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
    MissingResourceError,
    RecipeError,
)

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
"""What ends a command: Ctrl-C, a job scheduler, a terminal that is closed. Windows has no SIGHUP."""
_RUST_ERROR = re.compile(r"\(os error ([0-9]+)\)")
"""How safetensors and tokenizers, which are written in Rust, word an error of the operating system."""
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

    SIGTERM and SIGHUP end a command as Ctrl-C does, so that locks and half-written folders are cleaned up.
    """
    with interruptible_once(), terminal.reserved_stdout():
        try:
            done = function()
            if terminal.json:
                terminal.emit(json_object(done, None))
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary
            return fail(terminal, with_notes(failure_of(error), error), error)
        return done.exit_code


def fail(terminal: Terminal, failure: Failure, error: BaseException | None = None) -> int:
    """Shows a failure, emits it, and returns its exit code."""
    terminal.fail(failure.message, hint=failure.hint, error=error)
    return emit_failure(terminal, failure)


def emit_failure(terminal: Terminal, failure: Failure) -> int:
    """With `--json` writes a failure that the user has seen as the one object on stdout; returns its exit code."""
    if terminal.json:
        try:
            terminal.emit(json_object(Done(exit_code=failure.exit_code), failure))
        except MissingResourceError as unwritten:
            terminal.fail(unwritten.message, hint=unwritten.hint)
    return failure.exit_code


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
    system = operating_system_error(error)
    if system is not None and system.errno in DISK_FULL | NOT_ALLOWED:
        return operating_system_failure(system, kind)
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


def with_notes(failure: Failure, error: BaseException) -> Failure:
    """The failure with what was noted on the exception as further hints: what `--resume` can go on with."""
    hints = [failure.hint, *getattr(error, "__notes__", ())]
    return replace(failure, hint="\n".join(hint for hint in hints if hint) or None)


def operating_system_error(error: BaseException) -> OSError | None:
    """The error of the operating system that `error` is, or that it reports in words."""
    if isinstance(error, OSError):
        return error
    found = _RUST_ERROR.search(str(error))
    if found:
        return OSError(int(found[1]), os.strerror(int(found[1])))
    full = os.strerror(errno.ENOSPC)
    return OSError(errno.ENOSPC, full) if full in str(error) else None


def operating_system_failure(error: OSError, kind: str) -> Failure:
    where = f"{error.filename}: " if error.filename else ""
    full = error.errno in DISK_FULL
    named = full and isinstance(error.filename, str)
    free = f"; {free_bytes(error.filename):,} bytes are free" if named else ""
    hint = (
        "free some space, or put the output (-o) and $COMPRESS_CACHE on a larger disk"
        if full
        else "check the permissions of this path, or choose another output (-o)"
    )
    return Failure(EXIT_MISSING_RESOURCE, kind, f"{where}{error.strerror}{free}", hint)


def free_bytes(path: str) -> int:
    """Free bytes where a file is or was to be."""
    place = Path(path).absolute()
    return shutil.disk_usage(next(found for found in (place, *place.parents) if found.exists())).free


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    system = operating_system_error(error)
    if system is not None:
        return system.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no further message")


@contextmanager
def interruptible_once() -> Iterator[None]:
    """While open, the first of the ENDING signals raises KeyboardInterrupt in the main thread.

    Further ones would break the clean-up that it starts. They do nothing from then on, until the process has ended:
    a command that was interrupted has nothing else to do. A signal that was ignored before (nohup) stays ignored.
    """
    interrupted = False
    last: signal.Signals | None = None

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted, last
        if not interrupted:
            interrupted, last = True, signal.Signals(number)
            raise KeyboardInterrupt

    def lost(unraisable: Any) -> None:
        """Where the signal came during a destructor, Python drops the exception: it is sent again a moment later."""
        nonlocal interrupted
        if unraisable.exc_type is not KeyboardInterrupt or last is None:
            reported(unraisable)
            return
        interrupted = False
        again = threading.Timer(0.05, os.kill, (os.getpid(), last))
        again.daemon = True
        again.start()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    held = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in held:
        signal.signal(number, interrupt)
    reported, sys.unraisablehook = sys.unraisablehook, lost
    try:
        yield
    finally:
        sys.unraisablehook = reported
        # Not before: a process that the clean-up starts would inherit SIG_IGN, but not a function. The interpreter
        # takes functions away as it ends, but not SIG_IGN. One that was lost may still be on its way.
        for number, handler in held.items():
            signal.signal(number, handler if last is None else signal.SIG_IGN)
