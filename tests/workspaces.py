"""Runs that are stopped in their workspace, and what they leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.journal import Journal
from compress.workspace import opened


def content(folder: Path) -> dict[str, str]:
    """Every file below a folder, with its text."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def interrupted(output: Path, error: BaseException, *, parts: int = 2, resume: bool = False) -> list[str]:
    """A run that saves parts and then fails; returns what it said and what it noted on the error."""
    said: list[str] = []

    def fails() -> None:
        with opened(output, resume=resume, say=said.append) as workspace:
            journal = Journal.start(workspace.partial, {})
            for number in range(parts):
                journal.save(f"block-{number:05d}", {}, [])
            (workspace.stage / "half").write_text("x")
            raise error

    with pytest.raises(type(error)):
        fails()
    return said + getattr(error, "__notes__", [])
