"""The folder of a report that is not inside a model's output: what it may be, and that one run at a time writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import MissingResourceError, UsageError
from compress.output import PROVENANCE, REPORT_FILES, REPORT_FOLDER

if TYPE_CHECKING:
    from filelock import BaseFileLock

ELSEWHERE = "Give another folder for the report with -o."


def check_report_folder(folder: Path) -> None:
    """Refuses what is not new, and not the folder of an earlier report; touches nothing.

    Raises:
        UsageError: a file, a link, a model's folder, or a folder with something else in it.
        MissingResourceError: it cannot be looked into.
    """
    try:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{folder}: is no folder.", hint=ELSEWHERE)
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except OSError as error:
        raise MissingResourceError(f"{folder}: {error.strerror}.", hint=ELSEWHERE) from error
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"{str(folder)!r}: {error}.", hint=ELSEWHERE) from None
    if (folder.resolve().parent / PROVENANCE).is_file():
        raise UsageError(
            f"{folder}: lies in a folder that compress wrote, where the report is that of its run.", hint=ELSEWHERE
        )
    if names & {PROVENANCE, "config.json"}:
        raise UsageError(
            f"{folder}: is a model's folder.",
            hint=f"Give another one for the report, such as -o {folder}-{REPORT_FOLDER}.",
        )
    if strangers := sorted(names - REPORT_FILES):
        raise UsageError(f"{folder}: holds what is no part of a report: {', '.join(strangers[:5])}.", hint=ELSEWHERE)


@contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """Makes the folder, locks it, and clears what an earlier run left: no old verdict outlives a run that fails.

    Folders that were made and stay empty are removed at the end.

    Raises:
        UsageError: the lock's name is taken by something else.
        MissingResourceError: the folder cannot be made or written, or another run writes into it.
    """
    if folder is None:
        yield
        return
    import filelock

    folder = folder.resolve()  # `.` has no name, and two names of one folder are one lock
    lock = folder.parent / f".{folder.name}.lock"
    if os.path.lexists(lock) and not (lock.is_file() and not lock.is_symlink() and lock.lstat().st_size == 0):
        raise UsageError(f"{lock} is in the way; it is no empty file, so it is not compress's lock.", hint=ELSEWHERE)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    holding = filelock.FileLock(lock, timeout=0)
    try:
        _take(folder, holding)
        yield
    finally:
        if holding.is_locked:
            lock.unlink(missing_ok=True)
            holding.release()
        for path in made:
            with suppress(OSError):  # not empty: the report is there
                path.rmdir()


def _take(folder: Path, lock: BaseFileLock) -> None:
    import filelock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        for name in sorted(REPORT_FILES):
            (folder / name).unlink(missing_ok=True)
    except filelock.Timeout:
        raise MissingResourceError(
            f"{folder}: another run is writing into it (lock {lock.lock_file}).",
            hint="Wait for it, or give another folder with -o.",
        ) from None
    except OSError as error:
        raise MissingResourceError(f"{error.filename or folder}: {error.strerror}.", hint=ELSEWHERE) from error
