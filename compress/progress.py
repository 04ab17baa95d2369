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
