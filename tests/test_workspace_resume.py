"""What an interrupted run leaves for --resume, and what a later run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from workspaces import content, interrupted

from compress.errors import MismatchError, MissingResourceError, UsageError
from compress.journal import finished
from compress.output import MARKER
from compress.workspace import check_space, opened, publish


@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, OSError, MemoryError, RuntimeError, MissingResourceError, UsageError]
)
def test_a_run_that_fails_after_a_block_can_be_resumed(kind: type[BaseException], tmp_path: Path) -> None:
    told = interrupted(tmp_path / "deep" / "out", kind("why"))
    partial = tmp_path / "deep" / ".out.partial"
    assert told == [f"2 finished blocks are kept in {partial}: the same command with --resume goes on from there."]
    assert set(content(tmp_path / "deep")) == {
        f".out.partial/{name}"
        for name in (MARKER, "journal.json", "parts/block-00000.safetensors", "parts/block-00001.safetensors")
    }
    said: list[str] = []
    with opened(tmp_path / "deep" / "out", resume=True, say=said.append) as workspace:
        assert finished(workspace.partial) == ("block-00000", "block-00001")
        assert list(workspace.stage.iterdir()) == []
        publish(workspace)
        assert finished(workspace.partial) == ()
    assert said == []
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_a_run_that_fails_before_the_first_block_leaves_nothing(tmp_path: Path) -> None:
    assert interrupted(tmp_path / "out", KeyboardInterrupt(), parts=0) == []
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_run_says_what_it_discards_before_it_does(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", KeyboardInterrupt())
    left = []

    def say(message: str) -> None:
        left.append((message, finished(tmp_path / ".out.partial")))

    with opened(tmp_path / "out", say=say) as workspace:
        assert sorted(path.name for path in workspace.partial.iterdir()) == [MARKER, "stage"]
    (message, parts), *more = left
    assert message.startswith("Discarding 2 finished blocks")
    assert len(parts) == 2
    assert not more


def test_resuming_nothing_starts_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with opened(tmp_path / "out", resume=True, say=said.append):
            pass
    assert len(said) == 2
    assert all("starting from the beginning" in message for message in said)


def test_a_refused_resume_keeps_the_work_and_says_no_more(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", KeyboardInterrupt())
    error = MismatchError("another run")

    def refused() -> None:
        with opened(tmp_path / "out", resume=True):
            raise error

    with pytest.raises(MismatchError):
        refused()
    assert len(finished(tmp_path / ".out.partial")) == 2
    assert not hasattr(error, "__notes__")


def test_what_an_interrupted_run_left_counts_as_free(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", KeyboardInterrupt())
    there = tmp_path / ".out.partial" / "parts" / "block-00000.safetensors"
    with there.open("wb") as file:
        file.truncate(10**12)  # sparse
    check_space(tmp_path / "out", 10**12)
    with pytest.raises(MissingResourceError, match=r"MB are free, 1,000,000\.\d MB of an interrupted run are there"):
        check_space(tmp_path / "out", 10**18)
    with pytest.raises(MissingResourceError, match="MB are free"):
        check_space(tmp_path / "other", 10**18)
