"""Where the values of a recipe were written: a YAML file or the options of a command. Errors point there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


@dataclass(frozen=True)
class Origin:
    """Lines of a recipe file, or options of a command. All origins are equal: recipes differ by what they say.

    Attributes:
        file: the recipe file as the user named it; None for options.
        places: where every value stands in the file.
        options: the option that sets the value at a path. A path without one is named by the option above it.
    """

    file: str | None = field(default=None, compare=False)
    places: Mapping[Path, Place] = field(default_factory=dict, compare=False)
    options: Mapping[Path, str] = field(default_factory=dict, compare=False)

    def error(self, faults: Sequence[Fault]) -> UsageError:
        """All faults as one error: a RecipeError for a file, else a line for each option."""
        if self.file is not None:
            return RecipeError(self.problems(faults))
        return UsageError("\n".join(f"{self._option(path)}: {message}" for path, message in faults))

    def problems(self, faults: Sequence[Fault], keys: frozenset[Path] = frozenset()) -> list[Problem]:
        """Faults with their places in the file, in order. Paths in `keys` are wrong as keys, not for their values."""
        found = []
        for path, message in faults:
            value, key = self._place(path)
            position = key if key and path in keys else value
            found.append(Problem(self.file or "", *position, dotted(path), message))
        return in_order(found)

    def line(self, path: Path) -> int | None:
        """Line of the value at `path`, or None if it stands in no file."""
        return None if self.file is None else self._place(path).value.line

    def _place(self, path: Path) -> Place:
        """The place of `path`, or of the nearest map around it if it is not in the file."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(Position(1, 1), None))

    def _option(self, path: Path) -> str:
        above = (path[:end] for end in range(len(path), 0, -1))
        return next((self.options[part] for part in above if part in self.options), dotted(path))
