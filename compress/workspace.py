"""Where a run writes: the output folder, its sibling `.NAME.partial`, and how one becomes the other.

A run works in `.NAME.partial` and renames its finished, proved folder into place, so a half-written output never
looks complete. What is in the way is replaced only on request and only if it is ours (it carries a `compress.json`
that lists every file in it); it is moved aside first and removed after the new folder has its name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from compress.errors import MissingResourceError, UsageError

PROVENANCE = "compress.json"
REPORT_FOLDER = "report"


@dataclass(frozen=True)
class Workspace:
    """Attributes:
    output: the folder that will be there in the end.
    partial: `.NAME.partial` beside it, or inside it where the output is an empty mount point.
    stage: the folder inside `partial` that becomes the output.
    """

    output: Path
    partial: Path

    @property
    def stage(self) -> Path:
        return self.partial / "stage"


def check_output(output: Path, source: Path | None, *, overwrite: bool) -> None:
    """Refuses an output that cannot or must not be written; touches nothing.

    Args:
        source: the model folder, or None if the model comes from a hub.

    Raises:
        UsageError: the output is, contains or lies in the input; is a file or a link; has files that are not ours.
    """
    if output.is_symlink():
        raise UsageError(f"{output}: the output is a symbolic link.", hint="Give the folder itself with -o.")
    resolved = output.resolve()
    if source is not None:
        _check_apart(output, resolved, source)
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: the output exists and is a file.", hint="Give another folder with -o.")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise UsageError(
                f"{output}: the output folder exists and is not empty.",
                hint="Give another folder with -o, or --overwrite to replace a folder that compress wrote.",
            )
        _check_replaceable(output, resolved)
    _check_writable(output)


def _check_apart(output: Path, resolved: Path, source: Path) -> None:
    model = source.resolve()
    if resolved == model:
        relation = "is the model folder itself"
    elif model.is_relative_to(resolved):
        relation = "contains the model folder"
    elif resolved.is_relative_to(model):
        relation = "lies inside the model folder"
    else:
        return
    raise UsageError(f"{output}: the output {relation} ({model}).", hint="Give a folder outside the model with -o.")


def _check_replaceable(output: Path, resolved: Path) -> None:
    """--overwrite: only our own folder, whole, and never one that holds where we stand or a mount."""
    refusal = None
    if os.path.ismount(output):
        refusal = "is a mount point"
    elif Path.cwd().resolve().is_relative_to(resolved):
        refusal = "is the working directory or contains it"
    elif not (output / PROVENANCE).is_file():
        refusal = f"has no {PROVENANCE}, so compress did not write it"
    if refusal:
        raise UsageError(f"{output}: refusing to overwrite; it {refusal}.", hint="Give another folder with -o.")
    strangers = sorted(_files(output) - _listed(output))
    if strangers:
        shown = ", ".join(strangers[:5]) + (f" and {len(strangers) - 5} more" if len(strangers) > 5 else "")
        raise UsageError(
            f"{output}: refusing to overwrite; its {PROVENANCE} does not list: {shown}.",
            hint="Move these files away, or give another folder with -o.",
        )


def _files(folder: Path) -> set[str]:
    """Every file, link and empty folder, relative; report/ is ours as a whole."""
    found = set()
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir()):
            found.add(relative.as_posix())
    return {name for name in found if not name.startswith(f"{REPORT_FOLDER}/") or (folder / name).is_symlink()}


def _listed(output: Path) -> set[str]:
    try:
        provenance = json.loads((output / PROVENANCE).read_text(encoding="utf-8"))
        files = provenance["files"]
        return {PROVENANCE, REPORT_FOLDER, *(str(name) for name in files)}
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{output}: refusing to overwrite; its {PROVENANCE} is not one of ours.",
            hint="Give another folder with -o.",
        ) from None


def _check_writable(output: Path) -> None:
    parent = output if output.is_dir() else output.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{output}: {parent} is not a folder.", hint="Give another folder with -o.")
    # A folder's mode says nothing to root on a read-only file system; os.access asks the kernel.
    where = output.parent if output.is_dir() and not os.path.ismount(output) else parent
    if not os.access(where, os.W_OK | os.X_OK):
        raise UsageError(f"{output}: {where} is not writable.", hint="Give another folder with -o.")


def check_space(output: Path, needed: int) -> None:
    """Refuses to start where the disk cannot hold the parts and the result.

    Raises:
        MissingResourceError: fewer than `needed` bytes are free.
    """
    parent = output
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise MissingResourceError(
            f"{output}: the run needs {needed / 1e6:,.1f} MB of disk, {free / 1e6:,.1f} MB are free.",
            hint="Free some space, or give a folder on another disk with -o.",
        )


@contextmanager
def opened(output: Path) -> Iterator[Workspace]:
    """Locks the output and makes a fresh `.NAME.partial`; removes it at the end, whatever happened.

    Raises:
        MissingResourceError: another run holds the lock.
    """
    import filelock

    inside = output.is_dir() and os.path.ismount(output)
    partial = (output if inside else output.parent) / f".{output.resolve().name}.partial"
    made = _make_parents(partial.parent)
    lock = filelock.FileLock(partial.with_name(partial.name + ".lock"), timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise MissingResourceError(
            f"{output}: another run is writing this output (lock {lock.lock_file}).",
            hint="Wait for it, or give another folder with -o.",
        ) from None
    try:
        if partial.exists():
            shutil.rmtree(partial)
        (partial / "stage").mkdir(parents=True)
        yield Workspace(output, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _make_parents(folder: Path) -> list[Path]:
    """Makes a folder and its parents; returns the new ones, the deepest first."""
    new = []
    while not folder.exists():
        new.append(folder)
        folder = folder.parent
    for path in reversed(new):
        path.mkdir()
    return new


def publish(workspace: Workspace) -> None:
    """Gives the staged folder its name. An old output is moved aside first and removed last."""
    output, stage = workspace.output, workspace.stage
    if output.is_dir() and os.path.ismount(output):
        for path in sorted(stage.iterdir()):
            path.rename(output / path.name)
        return
    old = workspace.partial / "replaced"
    if output.exists():
        output.rename(old)
    try:
        stage.rename(output)
    except OSError:
        if old.exists():
            old.rename(output)
        raise
    if old.exists():
        shutil.rmtree(old)
