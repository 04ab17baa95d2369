"""`compress compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import compress
from sample_report import moved, sample_report

from compress.report.schema import Report, report_json


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    reports = {"before": sample_report(gates=()), "after": moved(sample_report(gates=()), "kl.mean", 0.02)}
    return written(tmp_path / "before.json", reports["before"]), written(tmp_path / "after.json", reports["after"])


def written(path: Path, report: Report) -> Path:
    path.write_text(report_json(report), encoding="utf-8")
    return path


def test_a_regression_ends_with_3_and_is_named_first(pair: tuple[Path, Path]) -> None:
    done = compress("compare", *pair)
    assert done.returncode == 3
    assert done.stdout.startswith("REGRESSION: kl.mean went from 0.07812 nats to 0.09812 nats")
    assert done.stderr == ""


def test_no_regression_ends_with_0(pair: tuple[Path, Path]) -> None:
    for arguments in ((pair[0], pair[0]), (pair[1], pair[0]), (*pair, "--tolerance", "kl.mean=0.05")):
        done = compress("compare", *arguments)
        assert done.returncode == 0
        assert done.stdout.startswith("NO REGRESSION")


def test_markdown_and_json(pair: tuple[Path, Path]) -> None:
    assert compress("compare", *pair, "--format", "md").stdout.startswith("<!-- compress-compare -->")
    data = json.loads(compress("compare", *pair, "--format", "json").stdout)
    assert (data["exit_code"], data["after"]["path"]) == (3, str(pair[1]))


def test_json_is_the_one_object(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "comment.md"
    done = compress("compare", *pair, "--json", "--format", "md", "-o", file)
    answer = json.loads(done.stdout)
    assert (answer["exit_code"], answer["error"], answer["report"]) == (3, None, str(pair[1]))
    assert answer["comparison"]["regressions"] == ["kl.mean went from 0.07812 nats to 0.09812 nats"]
    assert file.read_text(encoding="utf-8").startswith("<!-- compress-compare -->")


def test_bad_input(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for arguments, code, words in (
        ((pair[0], tmp_path / "none"), 9, "No such file"),
        ((*pair, "--tolerance", "kl.maen=1"), 2, "did you mean `kl.mean`?"),
        ((*pair, "--tolerance", "size=1"), 2, "MB"),
        ((pair[0],), 2, "Missing argument"),
    ):
        done = compress("compare", *arguments)
        assert (done.returncode, done.stdout) == (code, "")
        assert words in done.stderr
