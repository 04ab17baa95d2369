"""The errors a user can meet. Each carries its exit code and the way out.

Exit codes are a contract (README, "Exit codes"): scripts in CI branch on them. Gates do not raise; a verdict
maps to 0, 3 or 4 in `compress.verdict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_GATE_FAILED = 3
EXIT_INCONCLUSIVE = 4
EXIT_NO_CANDIDATE = 5
EXIT_MISMATCH = 7
EXIT_NOISY_MACHINE = 8
EXIT_MISSING_RESOURCE = 9
EXIT_BROKEN_RESULT = 10
EXIT_INTERRUPTED = 130


class CompressError(Exception):
    """Base of every expected error: one message (what, where, the rule) and a hint (the ways out)."""

    exit_code = EXIT_INTERNAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CompressError):
    """The command or the recipe asks for something that cannot be; found before any weight is loaded."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class Problem:
    """One fault in a recipe file. `line` and `column` count from 1; `path` is the dotted key path."""

    file: str
    line: int
    column: int
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}"
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


class RecipeError(UsageError):
    """All problems of a recipe at once."""

    def __init__(self, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        super().__init__("\n".join(str(problem) for problem in problems), hint=hint)
        self.problems = tuple(problems)


class MissingResourceError(CompressError):
    """Something the run needs is not there: model, data, an extra, memory, disk, or the output is in use."""

    exit_code = EXIT_MISSING_RESOURCE


class MismatchError(CompressError):
    """An interrupted run cannot be resumed, as its result would be another one than that of a straight run."""

    exit_code = EXIT_MISMATCH


class NoisyMachineError(CompressError):
    """The machine's own noise is larger than the precision asked for."""

    exit_code = EXIT_NOISY_MACHINE


class BrokenResultError(CompressError):
    """The result is broken: the proof failed, or numbers are not finite."""

    exit_code = EXIT_BROKEN_RESULT
