"""Where a run writes: what is refused, what is replaced, what is left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from compress.errors import MissingResourceError, UsageError
from compress.workspace import check_output, check_space, opened, publish


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def ours(folder: Path, *extra: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "compress.json").write_text(json.dumps({"files": {"config.json": "0"}}))
    for name in extra:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


@pytest.mark.parametrize("spelling", ["m", "m/../m", "./m", "m/out", "m/a/b", "."])
def test_output_in_or_around_the_input_is_refused(model: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13."""
    monkeypatch.chdir(model.parent)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="output"):
            check_output(Path(spelling), model, overwrite=overwrite)


def test_links_are_refused(model: Path, tmp_path: Path) -> None:
    to_model = tmp_path / "to_model"
    to_model.symlink_to(model)
    elsewhere = tmp_path / "link"
    elsewhere.symlink_to(ours(tmp_path / "real"))
    for link in (to_model, elsewhere):
        with pytest.raises(UsageError, match="symbolic link"):
            check_output(link, model, overwrite=True)


def test_a_link_on_the_way_to_the_input_is_seen(model: Path, tmp_path: Path) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(model)
    with pytest.raises(UsageError, match="inside the model folder"):
        check_output(alias / "out", model, overwrite=False)


def test_a_file_and_a_strange_folder_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        check_output(tmp_path / "file", model, overwrite=True)
    with pytest.raises(UsageError, match="not a folder"):
        check_output(tmp_path / "file" / "out", model, overwrite=True)
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        check_output(strange, model, overwrite=False)
    with pytest.raises(UsageError, match=r"compress\.json"):
        check_output(strange, model, overwrite=True)


def test_overwrite_takes_only_what_is_wholly_ours(model: Path, tmp_path: Path) -> None:
    check_output(ours(tmp_path / "a", "report/report.json"), model, overwrite=True)
    with pytest.raises(UsageError, match=r"notes\.txt"):
        check_output(ours(tmp_path / "b", "notes.txt"), model, overwrite=True)
    with pytest.raises(UsageError, match="deep/er"):
        check_output(ours(tmp_path / "c", "deep/er"), model, overwrite=True)
    broken = ours(tmp_path / "d")
    (broken / "compress.json").write_text("[1]")
    with pytest.raises(UsageError, match="not one of ours"):
        check_output(broken, model, overwrite=True)


def test_overwrite_never_takes_home_or_the_working_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("x")
    with pytest.raises(UsageError):
        check_output(home, model, overwrite=True)
    folder = ours(tmp_path / "here")
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    with pytest.raises(UsageError, match="working directory"):
        check_output(folder, model, overwrite=True)


def test_publish_replaces_the_old_folder_and_leaves_nothing_else(model: Path, tmp_path: Path) -> None:
    output = ours(tmp_path / "out", "report/old.md")
    with opened(output) as workspace:
        (workspace.stage / "new.txt").write_text("new")
        assert (output / "config.json").exists(), "the old folder stays until the new one is published"
        publish(workspace)
    assert sorted(path.name for path in output.iterdir()) == ["new.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]


def test_a_failed_run_leaves_no_trace(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "er" / "out"

    def interrupted() -> None:
        with opened(output) as workspace:
            (workspace.stage / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_runs_leftovers_are_cleared(tmp_path: Path) -> None:
    leftover = tmp_path / ".out.partial" / "stage"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("x")
    with opened(tmp_path / "out") as workspace:
        assert list(workspace.stage.iterdir()) == []


def _hold(output: Path, held: multiprocessing.synchronize.Event, done: multiprocessing.synchronize.Event) -> None:
    with opened(output):
        held.set()
        done.wait(60)


def test_two_runs_on_one_output(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "out", held, done))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(MissingResourceError, match="another run"), opened(tmp_path / "out"):
            pass
        assert (tmp_path / ".out.partial" / "stage").is_dir(), "the loser must not clear the winner's work"
    finally:
        done.set()
        other.join()


def test_space_is_checked_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(MissingResourceError, match="MB are free"):
        check_space(tmp_path / "a" / "out", 10**18)
    check_space(tmp_path / "a" / "out", 1)


def test_files_get_the_umasks_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with opened(tmp_path / "out") as workspace:
            (workspace.stage / "f").write_text("x")
            publish(workspace)
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
