"""Where a run writes: what is refused, what is replaced, what is left behind."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Collection
from pathlib import Path

import pytest
from workspaces import content

from compress import workspace as under_test
from compress.errors import MissingResourceError, UsageError
from compress.output import MARKER, REPORT_FILES, check_output
from compress.workspace import check_space, opened, publish


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def ours(folder: Path, *extra: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    written = {"config.json": hashlib.sha256(b"{}").hexdigest()}
    (folder / "compress.json").write_text(json.dumps({"files": written}))
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
    output = ours(tmp_path / "out", "report/report.md")
    with opened(output, model, overwrite=True) as workspace:
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
    (leftover.parent / MARKER).write_text("")
    (tmp_path / ".out.partial.lock").touch()
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


@pytest.mark.parametrize("kind", ["folder", "file", "link", "marker_link"])
def test_a_partial_that_compress_did_not_make_is_kept(kind: str, model: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    if kind == "file":
        partial.write_text("mine")
    elif kind == "link":
        partial.symlink_to(model)
    else:
        (partial / "stage").mkdir(parents=True)
        (partial / "stage" / "thesis.tex").write_text("mine")
    if kind == "marker_link":
        (partial / MARKER).symlink_to(model / "config.json")
    before = content(tmp_path)
    with pytest.raises(UsageError, match=r"\.out\.partial is in the way"):
        check_output(tmp_path / "out", model, overwrite=True)
    with pytest.raises(UsageError, match=r"\.out\.partial is in the way"), opened(tmp_path / "out"):
        pass
    assert content(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_lock_that_compress_did_not_make_is_kept(kind: str, model: Path, tmp_path: Path) -> None:
    lock = tmp_path / ".out.partial.lock"
    if kind == "file":
        lock.write_text("mine")
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(model / "config.json")
    before = content(tmp_path)
    with pytest.raises(UsageError, match=r"\.out\.partial\.lock is in the way"):
        check_output(tmp_path / "out", model, overwrite=True)
    with pytest.raises(UsageError, match=r"\.out\.partial\.lock is in the way"), opened(tmp_path / "out"):
        pass
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", [".out.partial", ".out.partial/stage", ".out.partial.lock", ".out.partial.lock/m"])
def test_the_model_is_never_where_the_run_works(name: str, tmp_path: Path) -> None:
    """Even if a killed run's marker makes it look like ours."""
    source = tmp_path / name
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (tmp_path / name.split("/")[0] / MARKER).write_text("")
    before = content(tmp_path)
    with pytest.raises(UsageError, match="model folder"):
        check_output(tmp_path / "out", source, overwrite=True)
    with pytest.raises(UsageError, match="model folder"), opened(tmp_path / "out", source, overwrite=True):
        pass
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["report/notes.txt", "report/deep/report.json", "report/deep/er"])
def test_overwrite_keeps_what_compress_never_writes_under_report(name: str, model: Path, tmp_path: Path) -> None:
    whole = ours(tmp_path / "whole", *(f"report/{known}" for known in REPORT_FILES))
    check_output(whole, model, overwrite=True)
    with pytest.raises(UsageError, match=name):
        check_output(ours(tmp_path / "out", "report/report.json", name), model, overwrite=True)


def test_overwrite_keeps_edited_files_and_links_and_names_all(model: Path, tmp_path: Path) -> None:
    output = ours(tmp_path / "out", "notes.txt")
    (output / "config.json").write_text('{"edited": true}')
    (output / "report").mkdir()
    (output / "report" / "report.json").symlink_to(model / "config.json")
    with pytest.raises(UsageError) as caught:
        check_output(output, model, overwrite=True)
    assert "does not list: notes.txt" in caught.value.message
    assert "links or other things than files: report/report.json" in caught.value.message
    assert "changed since compress wrote them: config.json" in caught.value.message


@pytest.mark.parametrize("name", ["config.json", "compress.json", "report"])
def test_overwrite_keeps_links_at_our_names(name: str, model: Path, tmp_path: Path) -> None:
    output = ours(tmp_path / "out")
    elsewhere = tmp_path / "elsewhere"
    if name == "report":
        elsewhere.mkdir()
    else:
        (output / name).rename(elsewhere)
    (output / name).symlink_to(elsewhere)
    with pytest.raises(UsageError, match="refusing to overwrite"):
        check_output(output, model, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_came_to_the_output_before_the_lock_is_kept(overwrite: bool, tmp_path: Path) -> None:
    output = tmp_path / "out"
    check_output(output, None, overwrite=overwrite)
    output.mkdir()
    (output / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError), opened(output, overwrite=overwrite):
        pass
    assert content(tmp_path) == {"out/thesis.tex": "mine"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_came_to_the_output_during_the_run_is_kept(kind: str, overwrite: bool, tmp_path: Path) -> None:
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()

    def late() -> None:
        with opened(output, overwrite=overwrite) as workspace:
            (workspace.stage / "new.txt").write_text("new")
            if kind == "folder":
                output.mkdir()
                (output / "thesis.tex").write_text("mine")
            elif kind == "file":
                output.write_text("mine")
            else:
                output.symlink_to(elsewhere)
            publish(workspace)

    with pytest.raises(UsageError, match="out"):
        late()
    assert not (output / "new.txt").exists()
    assert list(content(tmp_path).values()) == ([] if kind == "link" else ["mine"])


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with opened(output) as workspace:
        (workspace.stage / "new.txt").write_text("new")
        publish(workspace)
    assert content(tmp_path) == {"out/new.txt": "new"}


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_overwrite_checks_again_before_it_replaces(name: str, tmp_path: Path) -> None:
    output = ours(tmp_path / "out")

    def late() -> None:
        with opened(output, overwrite=True) as workspace:
            (workspace.stage / "new.txt").write_text("new")
            (output / name).write_text("mine")
            publish(workspace)

    with pytest.raises(UsageError, match=name):
        late()
    assert content(tmp_path)[f"out/{name}"] == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("call", [1, 2])
def test_what_comes_while_the_old_folder_is_moved_is_put_back(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the move aside (1), or between the two moves (2)."""
    output, moves = ours(tmp_path / "out"), []
    rename = Path.rename

    def interfering(path: Path, target: Path) -> Path:
        moves.append(path)
        if len(moves) == call:
            folder = output if call == 1 else tmp_path / ".out.partial" / "replaced"
            (folder / "notes.txt").write_text("mine")
        return rename(path, target)

    def late() -> None:
        with opened(output, overwrite=True) as workspace:
            (workspace.stage / "new.txt").write_text("new")
            monkeypatch.setattr(Path, "rename", interfering)
            try:
                publish(workspace)
            finally:
                assert (output / "notes.txt").exists(), "put back at once, not only when the run ends"

    with pytest.raises(UsageError, match=r"came or changed meanwhile: notes\.txt"):
        late()
    assert set(content(tmp_path)) == {"out/config.json", "out/compress.json", "out/notes.txt"}


def test_an_old_folder_that_a_killed_run_had_moved_aside_is_put_back(tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    ours(partial / "replaced")
    (partial / MARKER).write_text("")
    with pytest.raises(UsageError, match="not empty"), opened(tmp_path / "out"):
        pass
    assert set(content(tmp_path)) == {"out/config.json", "out/compress.json"}


def test_an_interrupt_during_the_clean_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clear, calls = under_test._clear, []

    def impatient(partial: Path, *, kept: Collection[str] = ()) -> None:
        calls.append(partial)
        if len(calls) == 2:  # the first call is the one that makes room
            raise KeyboardInterrupt
        clear(partial, kept=kept)

    monkeypatch.setattr(under_test, "_clear", impatient)
    with pytest.raises(KeyboardInterrupt), opened(tmp_path / "deep" / "out") as workspace:
        (workspace.stage / "half").write_text("x")
    assert len(calls) == 3
    assert list(tmp_path.iterdir()) == []
