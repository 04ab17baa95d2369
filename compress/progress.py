"""How long-running code tells the terminal where it is. The terminal's side lives in `cli/terminal.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[float], None]
"""Call with the amount of work done since the last call."""


class Progress(Protocol):
    def phase(self, name: str, total: float) -> AbstractContextManager[Advance]:
        """Opens a phase of `total` units of work (windows, layers, seconds) and yields its `advance`."""
        ...

    def say(self, message: str) -> None:
        """One line for the user (stderr), for what is worth knowing but is no result."""
        ...


class Silent:
    """A Progress that shows nothing, for tests and for use as a library."""

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[Advance]:  # noqa: ARG002 - the protocol's names
        yield lambda _amount: None

    def say(self, message: str) -> None:
        del message


class Share:
    """Turns windows into shares of one block, so that the bar moves inside a long block."""

    def __init__(self, advance: Advance, units: int) -> None:
        self._advance, self._unit, self._left = advance, 1.0 / units, 1.0

    def step(self) -> None:
        part = min(self._unit, self._left)
        self._left -= part
        self._advance(part)

    def finish(self) -> None:
        self._advance(self._left)
        self._left = 0.0
