"""Where a run writes: the output folder, its sibling `.NAME.partial`, and how one becomes the other.

A run works in `.NAME.partial` and renames its proved folder into place; an old output is moved aside first. Nothing is
removed that compress did not write: a partial with MARKER, an output whose files have the hashes in `compress.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import MissingResourceError, UsageError

if TYPE_CHECKING:
    from filelock import BaseFileLock

PROVENANCE = "compress.json"
REPORT_FOLDER = "report"
REPORT_FILES = frozenset({"report.json", "report.md", "latency.json", "fidelity.npz", "embeddings.npz"})
MARKER = ".compress-run"
LONGEST_NAME = 255 - len("..partial.lock")  # bytes; file systems take names of 255, and the lock's is the longest
ELSEWHERE = "Give another folder with -o."
MOVE = "Move what is in the way, or give another folder with -o."


@dataclass(frozen=True)
class Workspace:
    """Attributes:
    output: the folder that will be there in the end, resolved.
    partial: `.NAME.partial` beside it, or inside it where the output is an empty mount point.
    source: the model folder, resolved, or None if the model comes from a hub.
    overwrite: whether an output that is wholly ours may be replaced.
    stage: the folder inside `partial` that becomes the output.
    replaced: where the old output waits until the new one has its name.
    """

    output: Path
    partial: Path
    source: Path | None = None
    overwrite: bool = False

    @property
    def stage(self) -> Path:
        return self.partial / "stage"

    @property
    def replaced(self) -> Path:
        return self.partial / "replaced"

    @property
    def lock(self) -> Path:
        return self.partial.with_name(f"{self.partial.name}.lock")

    @property
    def inside(self) -> bool:
        return self.partial.parent == self.output


def check_output(output: Path, source: Path | None, *, overwrite: bool) -> None:
    """Refuses an output that cannot or must not be written; touches nothing.

    Args:
        source: the model folder, or None if the model comes from a hub.

    Raises:
        UsageError: the output, or what the run puts beside it, is, contains or lies in the input; is a file or a
            link; has files that are not ours; cannot be named or written.
    """
    _check(output, _located(output, source, overwrite=overwrite))


@contextmanager
def _refusing(output: Path) -> Iterator[None]:
    """A path that the system cannot even look at (a NUL, a name too long, a loop of links) is the user's mistake."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UnicodeEncodeError):
            raise  # the locale's fault
        shown = repr(str(output)) if "\0" in str(output) else output
        raise UsageError(f"{shown}: the output cannot be used: {error}.", hint=ELSEWHERE) from None


def _located(output: Path, source: Path | None, *, overwrite: bool) -> Workspace:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(f"{output}: the working directory no longer exists.", hint="Go to another folder.") from None
    with _refusing(output):
        resolved = output.parent.resolve() / output.name if output.is_symlink() else output.resolve()
        length = len(os.fsencode(resolved.name))
        if length > LONGEST_NAME:
            raise UsageError(f"{output}: the name has {length} bytes; the limit is {LONGEST_NAME}.", hint=ELSEWHERE)
        inside = resolved.is_dir() and os.path.ismount(resolved)
        partial = (resolved if inside else resolved.parent) / f".{resolved.name}.partial"
        return Workspace(resolved, partial, None if source is None else source.resolve(), overwrite)


def _check(shown: Path, workspace: Workspace) -> None:
    """All of `check_output`, on paths that are already resolved; `shown` is the output as the user wrote it."""
    output = workspace.output
    with _refusing(shown):
        _check_beside(shown, workspace)
        if output.exists() and not output.is_dir():
            raise UsageError(f"{shown}: the output exists and is a file.", hint=ELSEWHERE)
        if output.is_dir():
            if _occupied(workspace):
                if not workspace.overwrite:
                    raise UsageError(
                        f"{shown}: the output folder exists and is not empty.",
                        hint="Give another folder with -o, or --overwrite to replace a folder that compress wrote.",
                    )
                _check_replaceable(shown, output)
            elif Path.cwd().is_relative_to(output):
                raise UsageError(
                    f"{shown}: the output is the working directory; it is replaced as a whole.",
                    hint="Give a new folder's name with -o.",
                )
        _check_writable(shown, output)


def _check_beside(shown: Path, workspace: Workspace) -> None:
    """The names that a run makes or clears are apart from the model, and free or ours."""
    partial, lock = workspace.partial, workspace.lock
    if workspace.output.is_symlink():
        raise UsageError(f"{shown}: the output is a symbolic link.", hint="Give the folder itself with -o.")
    if workspace.source is not None:
        _check_apart(f"{shown}: the output", workspace.output, workspace.source)
        for path in (partial, lock):
            _check_apart(f"{shown}: {path}, which the run makes,", path, workspace.source)
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        refusal = f"{partial} is in the way; it is no folder"
    elif partial.is_dir() and any(partial.iterdir()) and not _is_plain_file(partial / MARKER):
        refusal = f"{partial} is in the way; it has no {MARKER}, so compress did not make it"
    elif os.path.lexists(lock) and not (_is_plain_file(lock) and lock.lstat().st_size == 0):
        refusal = f"{lock} is in the way; it is no empty file, so it is not compress's lock"
    else:
        return
    raise UsageError(f"{shown}: {refusal}.", hint=MOVE)


def _check_apart(subject: str, path: Path, model: Path) -> None:
    if not (path.is_relative_to(model) or model.is_relative_to(path)):
        return
    relation = "contains" if path != model and model.is_relative_to(path) else "lies inside"
    relation = "is the model folder itself" if path == model else f"{relation} the model folder"
    raise UsageError(f"{subject} {relation} ({model}).", hint="Give a folder outside the model with -o.")


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _occupied(workspace: Workspace) -> bool:
    """Whether the output has more in it than a run's own partial and lock (on a mount point, they lie inside)."""
    return any(path not in (workspace.partial, workspace.lock) for path in workspace.output.iterdir())


def _check_replaceable(shown: Path, output: Path) -> None:
    """--overwrite: only our own folder, whole and unchanged, and never one that holds where we stand or a mount."""
    refusal = None
    if os.path.ismount(output):
        refusal = "is a mount point"
    elif Path.cwd().is_relative_to(output):
        refusal = "is the working directory or contains it"
    elif not _is_plain_file(output / PROVENANCE):
        refusal = f"has no {PROVENANCE}, so compress did not write it"
    if refusal:
        raise UsageError(f"{shown}: refusing to overwrite; it {refusal}.", hint=ELSEWHERE)
    listed, found = _listed(shown, output), set(_contents(output))
    ours = {PROVENANCE, *listed, *(f"{REPORT_FOLDER}/{name}" for name in REPORT_FILES)}
    report = output / REPORT_FOLDER
    empty = report.is_dir() and not report.is_symlink() and not any(report.iterdir())
    strangers = found - ours - ({REPORT_FOLDER} if empty else set())
    special = {name for name in found & ours if not _is_plain_file(output / name)}
    changed = {name for name in found & set(listed) - special if _sha256(output / name) != listed[name]}
    reasons = {
        f"its {PROVENANCE} does not list": strangers,
        "these are links or other things than files": special,
        "these were changed since compress wrote them": changed,
    }
    if refusals := [f"{reason}: {_enumerated(names)}" for reason, names in reasons.items() if names]:
        raise UsageError(f"{shown}: refusing to overwrite; {'; '.join(refusals)}.", hint=MOVE)


def _enumerated(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def _contents(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every file, link, mount and empty folder, relative; with what tells later, unread, that it is still the same.

    Raises:
        OSError: a folder cannot be listed, so it may hold what is not ours.
    """

    def raises(error: OSError) -> None:
        raise error

    found = []
    for here, folders, files in os.walk(folder, onerror=raises):
        whole = [name for name in folders if (path := Path(here, name)).is_symlink() or os.path.ismount(path)]
        found += [Path(here, name) for name in (*files, *whole)]
        if not folders and not files and Path(here) != folder:
            found.append(Path(here))
        folders[:] = [name for name in folders if name not in whole]
    facts = {path.relative_to(folder).as_posix(): path.lstat() for path in found}
    return {name: (at.st_mode, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in facts.items()}


def _listed(shown: Path, output: Path) -> dict[str, str]:
    """SHA-256 by name, as the run that wrote the folder recorded them."""
    try:
        files = json.loads((output / PROVENANCE).read_text(encoding="utf-8"))["files"]
        return {str(name): str(sha256) for name, sha256 in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        refusal = f"refusing to overwrite; its {PROVENANCE} is not one of ours"
        raise UsageError(f"{shown}: {refusal}.", hint=ELSEWHERE) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_writable(shown: Path, output: Path) -> None:
    parent = _nearest(output)
    if not parent.is_dir():
        raise UsageError(f"{shown}: {parent} is not a folder.", hint=ELSEWHERE)
    # A folder's mode says nothing to root on a read-only file system; os.access asks the kernel.
    where = output.parent if output.is_dir() and not os.path.ismount(output) else parent
    if not os.access(where, os.W_OK | os.X_OK):
        raise UsageError(f"{shown}: {where} is not writable.", hint=ELSEWHERE)


def check_space(output: Path, needed: int) -> None:
    """Refuses to start where the disk cannot hold the parts and the result.

    Raises:
        MissingResourceError: fewer than `needed` bytes are free.
    """
    free = shutil.disk_usage(_nearest(output)).free
    if free < needed:
        raise MissingResourceError(
            f"{output}: the run needs {needed / 1e6:,.1f} MB of disk, {free / 1e6:,.1f} MB are free.",
            hint="Free some space, or give a folder on another disk with -o.",
        )


@contextmanager
def opened(output: Path, source: Path | None = None, *, overwrite: bool = False) -> Iterator[Workspace]:
    """Locks the output and makes a fresh `.NAME.partial`; removes it at the end, whatever happened.

    Raises:
        MissingResourceError: another run holds the lock.
        UsageError: see `check_output`, which is repeated under the lock.
    """
    import filelock

    workspace = _located(output, source, overwrite=overwrite)
    with _refusing(output):
        _check_beside(output, workspace)
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
        _check(output, workspace)
        _clear(workspace.partial)
        workspace.partial.mkdir()
        (workspace.partial / MARKER).write_text("compress works in this folder and removes it.\n", encoding="utf-8")
        workspace.stage.mkdir()
        yield workspace
    finally:
        try:
            _close(workspace, lock, missing)
        except KeyboardInterrupt:
            _close(workspace, lock, missing)
            raise


def _nearest(path: Path) -> Path:
    """The path itself or the nearest folder above it that is there."""
    return next(found for found in (path, *path.parents) if found.exists())


def _close(workspace: Workspace, lock: BaseFileLock, made: list[Path]) -> None:
    """May be interrupted anywhere and called again."""
    if lock.is_locked:
        with suppress(OSError):
            _put_back(workspace)
            _clear(workspace.partial)
        with suppress(OSError):
            if _is_plain_file(workspace.lock) and workspace.lock.lstat().st_size == 0:
                workspace.lock.unlink()
        lock.release()
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def _put_back(workspace: Workspace) -> None:
    if workspace.replaced.is_dir() and not os.path.lexists(workspace.output):
        workspace.replaced.rename(workspace.output)


def _clear(partial: Path) -> None:
    """Removes a partial of ours; the marker goes last, so what an interruption leaves is still known as ours."""
    if partial.is_symlink() or not partial.is_dir():
        return
    marker = partial / MARKER
    if _is_plain_file(marker):
        for path in [path for path in partial.iterdir() if path != marker]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if any(path != marker for path in partial.iterdir()):
            return
        marker.unlink()
    partial.rmdir()


def publish(workspace: Workspace) -> None:
    """Gives the staged folder its name. An old output is moved aside first and removed last.

    Raises:
        UsageError: what is at the output by now must not be replaced; it stays as it is.
    """
    output = workspace.output
    if workspace.inside:
        _fill(workspace)
        return
    with _refusing(output):
        if workspace.overwrite and output.is_dir() and _occupied(workspace):
            _replace(workspace)
            return
        _check(output, workspace)
        if output.is_dir():
            output.rmdir()  # fails, as the rename does, if a file has come meanwhile
        workspace.stage.rename(output)


def _fill(workspace: Workspace) -> None:
    """A mount point cannot be renamed: its new files are moved in one by one, all or none."""
    output = workspace.output
    names = sorted(path.name for path in workspace.stage.iterdir())
    try:
        for index, name in enumerate(names):
            if taken := [late for late in names[index:] if os.path.lexists(output / late)]:
                raise UsageError(f"{output}: these came into the output: {_enumerated(taken)}.", hint=MOVE)
            if index == 0:
                _check(output, workspace)
            (workspace.stage / name).rename(output / name)
    except BaseException:
        for name in names:
            if not os.path.lexists(workspace.stage / name):
                (output / name).rename(workspace.stage / name)
        raise


def _replace(workspace: Workspace) -> None:
    output, old = workspace.output, workspace.replaced
    before = _contents(output)
    _check(output, workspace)
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
    now = _contents(workspace.replaced)
    if touched := {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}:
        refusal = f"refusing to overwrite; these came or changed meanwhile: {_enumerated(touched)}"
        raise UsageError(f"{workspace.output}: {refusal}.", hint=MOVE)
