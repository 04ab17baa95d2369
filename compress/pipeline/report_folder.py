"""The folder of a report that is not inside a model's output: what it may be, and that one run at a time writes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import MissingResourceError, UsageError
from compress.output import PROVENANCE, REPORT_FILES, REPORT_FOLDER

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
        if not folder.is_dir():
            return
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise MissingResourceError(f"{folder}: {error.strerror}.", hint=ELSEWHERE) from error
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"{str(folder)!r}: {error}.", hint=ELSEWHERE) from None
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

    Raises:
        MissingResourceError: it cannot be made or written, or another run writes into it.
    """
    if folder is None:
        yield
        return
    import filelock

    lock = filelock.FileLock(folder.parent / f".{folder.name}.lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        for name in REPORT_FILES:
            (folder / name).unlink(missing_ok=True)
    except filelock.Timeout:
        raise MissingResourceError(
            f"{folder}: another run is writing into it (lock {lock.lock_file}).",
            hint="Wait for it, or give another folder with -o.",
        ) from None
    except OSError as error:
        lock.release()
        raise MissingResourceError(f"{folder}: {error.strerror}.", hint=ELSEWHERE) from error
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
