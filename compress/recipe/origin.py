"""Where the values of a recipe were written: a YAML file or the options of a command. Errors point there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from compress.errors import Problem, RecipeError, UsageError

Path = tuple[str | int, ...]
"""Keys and list indices from the top of a recipe to a value."""

Fault = tuple[Path, str]
"""What is wrong (a sentence), and where."""


class Position(NamedTuple):
    """Counted from 1, columns in characters."""

    line: int
    column: int


class Place(NamedTuple):
    """Where a value and its key stand in the file; a list item has no key."""

    value: Position
    key: Position | None


def dotted(path: Path) -> str:
    """`steps[0].quantize.target`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Problems as they come in the file."""
    return sorted(problems, key=lambda problem: (problem.line, problem.column))


class Origin(Protocol):
    def error(self, faults: Sequence[Fault], *, keys: frozenset[Path] = frozenset()) -> UsageError:
        """All faults as one error. The paths in `keys` are wrong as keys, not for their values."""
        ...

    def line(self, path: Path) -> int | None:
        """Line of the value at `path`, or None if it stands in no file."""
        ...


@dataclass(frozen=True)
class FileOrigin:
    """A recipe file. Origins do not take part in the equality of recipes."""

    file: str = field(compare=False)
    places: Mapping[Path, Place] = field(compare=False)

    def error(self, faults: Sequence[Fault], *, keys: frozenset[Path] = frozenset()) -> RecipeError:
        return RecipeError(in_order([self._problem(path, message, path in keys) for path, message in faults]))

    def line(self, path: Path) -> int | None:
        return self._place(path).value.line

    def _problem(self, path: Path, message: str, at_key: bool) -> Problem:
        place = self._place(path)
        position = place.key if at_key and place.key else place.value
        return Problem(self.file, position.line, position.column, dotted(path), message)

    def _place(self, path: Path) -> Place:
        """The place of `path`, or of the nearest map around it if it is not in the file."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(Position(1, 1), None))


@dataclass(frozen=True)
class OptionOrigin:
    """Options of a command. A path without an option of its own is named by the option above it."""

    options: Mapping[Path, str] = field(default_factory=dict, compare=False)

    def error(self, faults: Sequence[Fault], *, keys: frozenset[Path] = frozenset()) -> UsageError:  # noqa: ARG002 - options have no key beside the value
        return UsageError("\n".join(f"{self._name(path)}: {message}" for path, message in faults))

    def line(self, path: Path) -> int | None:  # noqa: ARG002 - the protocol's name
        return None

    def _name(self, path: Path) -> str:
        above = (path[:end] for end in range(len(path), 0, -1))
        return next((self.options[part] for part in above if part in self.options), dotted(path))
