"""Where a run works: `.NAME.partial` beside its output, and how its proved folder becomes the output.

The folder is renamed into place; an old output is moved aside first. The partial is removed at the end, unless the run
failed with finished parts in a journal: then it stays for `--resume`. Nothing is removed that compress did not write.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from compress.durable import write_bytes
from compress.errors import MismatchError, MissingResourceError, UsageError
from compress.journal import NAMES, counted, finished, forget
from compress.output import (
    MARKER,
    MOVE,
    Workspace,
    check,
    check_beside,
    contents,
    enumerated,
    is_plain_file,
    located,
    nearest,
    occupied,
    refusing,
)

if TYPE_CHECKING:
    from filelock import BaseFileLock


def check_space(output: Path, needed: int) -> None:
    """Refuses to start where the disk cannot hold the parts and the result.

    What an interrupted run has left counts as free: the run goes on with it or removes it.

    Raises:
        MissingResourceError: fewer than `needed` bytes are free.
    """
    free, there = shutil.disk_usage(nearest(output)).free, _left_behind(located(output, None, overwrite=False))
    if free + there < needed:
        more = f", {there / 1e6:,.1f} MB of an interrupted run are there" if there else ""
        raise MissingResourceError(
            f"{output}: the run needs {needed / 1e6:,.1f} MB of disk, {free / 1e6:,.1f} MB are free{more}.",
            hint="Free some space, or give a folder on another disk with -o.",
        )


def _left_behind(workspace: Workspace) -> int:
    """Bytes in a partial of ours, without an old output that waits in it."""
    if not is_plain_file(workspace.partial / MARKER):
        return 0
    files = (path for path in workspace.partial.rglob("*") if not path.is_relative_to(workspace.replaced))
    return sum(path.lstat().st_size for path in files if is_plain_file(path))


def _silent(message: str) -> None:
    del message


@contextmanager
def opened(
    output: Path,
    source: Path | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    say: Callable[[str], None] = _silent,
) -> Iterator[Workspace]:
    """Locks the output and makes `.NAME.partial`; removes it at the end, unless there is something to resume.

    Args:
        resume: keep the journals that an interrupted run has left; what else it left is removed.
        say: told what is kept, what is discarded.

    Raises:
        MissingResourceError: another run holds the lock.
        UsageError: see `check_output`, which is repeated under the lock.
    """
    import filelock

    workspace = located(output, source, overwrite=overwrite)
    with refusing(output):
        check_beside(output, workspace)
        parents = [workspace.partial.parent, *workspace.partial.parent.parents]
        missing = [folder for folder in parents if not folder.exists()]
    lock = filelock.FileLock(workspace.lock, timeout=0)
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise MissingResourceError(
                f"{output}: another run is writing this output (lock {lock.lock_file}).",
                hint="Wait for it, or give another folder with -o.",
            ) from None
        _put_back(workspace)  # a run was killed between its two renames
        check(output, workspace)
        _prepare(workspace, resume=resume, say=say)
        with _telling(workspace):
            yield workspace
    finally:
        try:
            _close(workspace, lock, missing)
        except KeyboardInterrupt:
            _close(workspace, lock, missing)
            raise


def _prepare(workspace: Workspace, *, resume: bool, say: Callable[[str], None]) -> None:
    partial, found = workspace.partial, _finished(workspace)
    if resume and not found:
        say(f"--resume: no interrupted run of this output is in {partial}; starting from the beginning.")
    elif found and not resume:
        say(f"Discarding {counted(found)} of an interrupted run in {partial}; --resume goes on from there instead.")
    _clear(partial, kept=_journals(workspace) if resume else ())
    partial.mkdir(exist_ok=True)
    if not is_plain_file(partial / MARKER):
        write_bytes(partial / MARKER, b"compress works in this folder; what --resume needs is kept here.\n")
    workspace.stage.mkdir()


def _finished(workspace: Workspace) -> tuple[str, ...]:
    """Names of the finished parts of all steps."""
    pruned = finished(workspace.pruning) if _is_folder(workspace.pruning) else ()
    return (*pruned, *finished(workspace.partial))


def _journals(workspace: Workspace) -> tuple[str, ...]:
    """Names in the partial of the journals that have finished parts."""
    pruned = _is_folder(workspace.pruning) and bool(finished(workspace.pruning))
    last = bool(finished(workspace.partial))
    return (*(NAMES if last else ()), *((workspace.pruning.name,) if pruned else ()))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@contextmanager
def _telling(workspace: Workspace) -> Iterator[None]:
    """Adds to an error what is kept for --resume and where."""
    try:
        yield
    except BaseException as error:
        found = _finished(workspace)
        if found and not isinstance(error, MismatchError):  # whose hint says how to go on
            kept = f"{counted(found)} {'is' if len(found) == 1 else 'are'} kept in {workspace.partial}"
            error.add_note(f"{kept}: the same command with --resume goes on from there.")
        raise


def _close(workspace: Workspace, lock: BaseFileLock, made: list[Path]) -> None:
    """May be interrupted anywhere and called again."""
    if lock.is_locked:
        with suppress(OSError):
            _put_back(workspace)
            _clear(workspace.partial, kept=_journals(workspace))
        with suppress(OSError):
            if is_plain_file(workspace.lock) and workspace.lock.lstat().st_size == 0:
                workspace.lock.unlink()
        lock.release()
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def _put_back(workspace: Workspace) -> None:
    if workspace.replaced.is_dir() and not os.path.lexists(workspace.output):
        workspace.replaced.rename(workspace.output)


def _clear(partial: Path, *, kept: Collection[str] = ()) -> None:
    """Removes a partial of ours, or all but the marker and what is `kept` of it.

    The marker goes last, so what an interruption leaves is still known as ours.
    """
    if partial.is_symlink() or not partial.is_dir():
        return
    marker = partial / MARKER
    if is_plain_file(marker):
        for path in [path for path in partial.iterdir() if path != marker and path.name not in kept]:
            if _is_folder(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if kept or any(path != marker for path in partial.iterdir()):
            return
        marker.unlink()
    partial.rmdir()


def publish(workspace: Workspace) -> None:
    """Gives the staged folder its name; from then on there is nothing to resume.

    An old output is moved aside first and removed last.

    Raises:
        UsageError: what is at the output by now must not be replaced; it stays as it is.
    """
    output = workspace.output
    if workspace.inside:
        _fill(workspace)
    else:
        with refusing(output):
            if workspace.overwrite and output.is_dir() and occupied(workspace):
                _replace(workspace)
            else:
                check(output, workspace)
                if output.is_dir():
                    output.rmdir()  # fails, as the rename does, if a file has come meanwhile
                workspace.stage.rename(output)
    forget(workspace.pruning)
    forget(workspace.partial)


def _fill(workspace: Workspace) -> None:
    """A mount point cannot be renamed: its new files are moved in one by one, all or none."""
    output = workspace.output
    names = sorted(path.name for path in workspace.stage.iterdir())
    try:
        for index, name in enumerate(names):
            if taken := [late for late in names[index:] if os.path.lexists(output / late)]:
                raise UsageError(f"{output}: these came into the output: {enumerated(taken)}.", hint=MOVE)
            if index == 0:
                check(output, workspace)
            (workspace.stage / name).rename(output / name)
    except BaseException:
        for name in names:
            if not os.path.lexists(workspace.stage / name):
                (output / name).rename(workspace.stage / name)
        raise


def _replace(workspace: Workspace) -> None:
    output, old = workspace.output, workspace.replaced
    before = contents(output)
    check(output, workspace)
    output.rename(old)
    try:
        _check_untouched(workspace, before)
        workspace.stage.rename(output)
        _check_untouched(workspace, before)
    except BaseException:
        if not workspace.stage.exists():
            output.rename(workspace.stage)
        _put_back(workspace)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_untouched(workspace: Workspace, before: dict[str, tuple[int, ...]]) -> None:
    now = contents(workspace.replaced)
    if touched := {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}:
        refusal = f"refusing to overwrite; these came or changed meanwhile: {enumerated(touched)}"
        raise UsageError(f"{workspace.output}: {refusal}.", hint=MOVE)
