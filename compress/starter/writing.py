"""New files, whole or not at all, and never in the place of another."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from compress.durable import sync_folder
from compress.errors import UsageError
from compress.output import refusing

WAYS = "Move them, or write elsewhere (-o for the recipe, --ci none for no CI job)."


def check_free(paths: list[Path]) -> None:
    """Raises UsageError if any of the files is there, naming all of them, or cannot be."""
    there = [path for path in paths if _is_there(path)]
    if there:
        raise UsageError(f"{', '.join(map(str, there))}: already there, and nothing is overwritten.", hint=WAYS)
    for path in paths:
        above = next(folder for folder in path.parents if os.path.lexists(folder))
        if not above.is_dir():
            raise UsageError(f"{path}: {above} is not a folder.", hint=WAYS)


def write_new(texts: Mapping[Path, str]) -> None:
    """Writes all of the files, or none.

    Raises:
        UsageError: one of them is there, also if it came while this was writing.
        OSError: no permission, no space.
    """
    check_free(list(texts))
    made: list[Path] = []
    try:
        for path, text in texts.items():
            made += _make_folders(path.parent)
            _write_one(path, text)
            made.append(path)
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise


def _is_there(path: Path) -> bool:
    with refusing(path):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def _make_folders(folder: Path) -> list[Path]:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _write_one(path: Path, text: str) -> None:
    """A link gives the finished file its name, and fails where that is taken; where there are no links, a new file."""
    staged = path.with_name(f".compress-{secrets.token_hex(8)}")
    try:
        with staged.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(staged, path)
        except FileExistsError:
            raise
        except OSError:
            with path.open("xb") as file:
                file.write(text.encode())
    except FileExistsError as error:
        raise UsageError(f"{path}: already there, and nothing is overwritten.", hint=WAYS) from error
    finally:
        with suppress(OSError):
            staged.unlink()
    sync_folder(path.parent)
