"""Which folder a run may write: what the output, and the names that the run puts beside it, must and must not be.

Nothing here changes anything. Nothing of the user's may be replaced: not the model, not what compress did not write,
not what was changed since compress wrote it; an output is ours if its files have the hashes in `compress.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compress.durable import sha256
from compress.errors import UsageError

PROVENANCE = "compress.json"
REPORT_FOLDER = "report"
REPORT_FILES = frozenset(
    {"report.json", "report.md", "report.html", "junit.xml", "metrics.json", "samples.jsonl", "latency.jsonl"}
)
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
    dense: the weights that the run starts from, where its model was quantized already.
    pruning: the journal of the step `prune`, beside that of the last step.
    pruned: the folder that this step makes, which the next step starts from or which becomes `stage`.
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
    def dense(self) -> Path:
        return self.partial / "dense"

    @property
    def pruning(self) -> Path:
        return self.partial / "prune"

    @property
    def pruned(self) -> Path:
        return self.partial / "pruned"

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
    check(output, located(output, source, overwrite=overwrite))


@contextmanager
def refusing(output: Path) -> Iterator[None]:
    """A path that the system cannot even look at (a NUL, a name too long, a loop of links) is the user's mistake."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UnicodeEncodeError):
            raise  # the locale's fault
        shown = repr(str(output)) if "\0" in str(output) else output
        raise UsageError(f"{shown}: the output cannot be used: {error}.", hint=ELSEWHERE) from None


def located(output: Path, source: Path | None, *, overwrite: bool) -> Workspace:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(f"{output}: the working directory no longer exists.", hint="Go to another folder.") from None
    with refusing(output):
        resolved = output.parent.resolve() / output.name if output.is_symlink() else output.resolve()
        length = len(os.fsencode(resolved.name))
        if length > LONGEST_NAME:
            raise UsageError(f"{output}: the name has {length} bytes; the limit is {LONGEST_NAME}.", hint=ELSEWHERE)
        inside = resolved.is_dir() and os.path.ismount(resolved)
        partial = (resolved if inside else resolved.parent) / f".{resolved.name}.partial"
        return Workspace(resolved, partial, None if source is None else source.resolve(), overwrite)


def check(shown: Path, workspace: Workspace) -> None:
    """All of `check_output`, on paths that are already resolved; `shown` is the output as the user wrote it."""
    output = workspace.output
    with refusing(shown):
        check_beside(shown, workspace)
        if output.exists() and not output.is_dir():
            raise UsageError(f"{shown}: the output exists and is a file.", hint=ELSEWHERE)
        if output.is_dir():
            if occupied(workspace):
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


def check_beside(shown: Path, workspace: Workspace) -> None:
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
    elif partial.is_dir() and any(partial.iterdir()) and not is_plain_file(partial / MARKER):
        refusal = f"{partial} is in the way; it has no {MARKER}, so compress did not make it"
    elif os.path.lexists(lock) and not (is_plain_file(lock) and lock.lstat().st_size == 0):
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


def is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def occupied(workspace: Workspace) -> bool:
    """Whether the output has more in it than a run's own partial and lock (on a mount point, they lie inside)."""
    return any(path not in (workspace.partial, workspace.lock) for path in workspace.output.iterdir())


def _check_replaceable(shown: Path, output: Path) -> None:
    """--overwrite: only our own folder, whole and unchanged, and never one that holds where we stand or a mount."""
    refusal = None
    if os.path.ismount(output):
        refusal = "is a mount point"
    elif Path.cwd().is_relative_to(output):
        refusal = "is the working directory or contains it"
    elif not is_plain_file(output / PROVENANCE):
        refusal = f"has no {PROVENANCE}, so compress did not write it"
    if refusal:
        raise UsageError(f"{shown}: refusing to overwrite; it {refusal}.", hint=ELSEWHERE)
    listed, found = _listed(shown, output), set(contents(output))
    ours = {PROVENANCE, *listed, *(f"{REPORT_FOLDER}/{name}" for name in REPORT_FILES)}
    report = output / REPORT_FOLDER
    empty = report.is_dir() and not report.is_symlink() and not any(report.iterdir())
    strangers = found - ours - ({REPORT_FOLDER} if empty else set())
    special = {name for name in found & ours if not is_plain_file(output / name)}
    changed = {name for name in found & set(listed) - special if sha256(output / name) != listed[name]}
    reasons = {
        f"its {PROVENANCE} does not list": strangers,
        "these are links or other things than files": special,
        "these were changed since compress wrote them": changed,
    }
    if refusals := [f"{reason}: {enumerated(names)}" for reason, names in reasons.items() if names]:
        raise UsageError(f"{shown}: refusing to overwrite; {'; '.join(refusals)}.", hint=MOVE)


def enumerated(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def contents(folder: Path) -> dict[str, tuple[int, ...]]:
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


def _check_writable(shown: Path, output: Path) -> None:
    parent = nearest(output)
    if not parent.is_dir():
        raise UsageError(f"{shown}: {parent} is not a folder.", hint=ELSEWHERE)
    # A folder's mode says nothing to root on a read-only file system; os.access asks the kernel.
    where = output.parent if output.is_dir() and not os.path.ismount(output) else parent
    if not os.access(where, os.W_OK | os.X_OK):
        raise UsageError(f"{shown}: {where} is not writable.", hint=ELSEWHERE)


def nearest(path: Path) -> Path:
    """The path itself or the nearest folder above it that is there."""
    return next(found for found in (path, *path.parents) if found.exists())
