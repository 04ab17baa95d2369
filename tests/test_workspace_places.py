"""Outputs in odd places: mount points, the working directory, names that no file system takes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from workspaces import content, interrupted

from compress.errors import UsageError
from compress.journal import finished
from compress.output import LONGEST_NAME, check_output
from compress.workspace import opened, publish


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that says it is a mount point: mounting needs root."""
    folder = tmp_path / "mount"
    folder.mkdir()
    ismount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder or ismount(path))
    return folder


def test_a_mount_point_is_filled(mount: Path) -> None:
    for _ in range(2):
        with opened(mount) as workspace:
            (workspace.stage / "new.txt").write_text("new")
            (workspace.stage / "sub").mkdir()
            publish(workspace)
        assert sorted(path.name for path in mount.iterdir()) == ["new.txt", "sub"]
        shutil.rmtree(mount / "sub")
        (mount / "new.txt").unlink()


def test_on_a_mount_point_nothing_is_replaced(mount: Path) -> None:
    def late() -> None:
        with opened(mount) as workspace:
            for name in ("a.txt", "new.txt"):
                (workspace.stage / name).write_text("new")
            (mount / "new.txt").write_text("mine")
            publish(workspace)

    with pytest.raises(UsageError, match=r"came into the output: new\.txt"):
        late()
    assert content(mount) == {"new.txt": "mine"}


def test_a_mount_point_that_is_no_longer_empty_is_not_filled(mount: Path) -> None:
    def late() -> None:
        with opened(mount) as workspace:
            (workspace.stage / "new.txt").write_text("new")
            (mount / "thesis.tex").write_text("mine")
            publish(workspace)

    with pytest.raises(UsageError, match="not empty"):
        late()
    assert content(mount) == {"thesis.tex": "mine"}


def test_on_a_mount_point_it_is_all_or_nothing(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def interfering(path: Path, target: Path) -> Path:
        if path.name == "a.txt":
            (mount / "new.txt").write_text("mine")
        return rename(path, target)

    def late() -> None:
        with opened(mount) as workspace:
            for name in ("a.txt", "new.txt"):
                (workspace.stage / name).write_text("new")
            monkeypatch.setattr(Path, "rename", interfering)
            publish(workspace)

    with pytest.raises(UsageError, match=r"came into the output: new\.txt"):
        late()
    assert content(mount) == {"new.txt": "mine"}


def test_the_working_directory_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for spelling in (".", "../here", str(here)):
        with pytest.raises(UsageError, match="working directory"):
            check_output(Path(spelling), None, overwrite=False)
        with pytest.raises(UsageError, match="working directory"), opened(Path(spelling)):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # goes back at the end
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="no longer exists"):
        check_output(Path("out"), None, overwrite=False)


def test_names_that_no_file_system_takes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(LONGEST_NAME)):
        check_output(tmp_path / ("é" * (LONGEST_NAME // 2 + 1)), None, overwrite=False)
    with pytest.raises(UsageError, match="null"):
        check_output(tmp_path / "a\0b", None, overwrite=False)
    with pytest.raises(UsageError, match="too long"):
        check_output(tmp_path / ("x" * 300) / "out", None, overwrite=False)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(UsageError, match="loop"):
        check_output(loop / "out", None, overwrite=False)
    with opened(tmp_path / ("x" * LONGEST_NAME)) as workspace:
        publish(workspace)


def test_resume_on_a_mount_point(mount: Path) -> None:
    interrupted(mount, KeyboardInterrupt())
    assert len(finished(mount / ".mount.partial")) == 2
    with opened(mount, resume=True) as workspace:
        assert len(finished(workspace.partial)) == 2
        (workspace.stage / "new.txt").write_text("new")
        publish(workspace)
    assert content(mount) == {"new.txt": "new"}
