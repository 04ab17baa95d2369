"""`compress report` and `compress schema --report`."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commandline import ROOT, compress
from sample_report import fidelity, sample_report, task_report

from compress.report.schema import Report, report_json


def written(folder: Path, report: Report) -> Path:
    (folder / "report").mkdir()
    (folder / "report" / "report.json").write_text(report_json(report), encoding="utf-8")
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return written(tmp_path, task_report())


def test_text_and_exit_code_are_those_of_the_verdict(output: Path) -> None:
    done = compress("report", output)
    assert done.returncode == 3
    assert done.stdout.startswith("FAIL: 2 of 5 gates failed")
    assert "next_sentence" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("gates", "noise", "code"),
    [((), None, 0), (("kl.mean <= 0.01",), None, 3), (("memory.peak <= 5MB",), None, 4), ((), "too noisy", 8)],
)
def test_every_verdict_has_its_exit_code(gates: tuple[str, ...], noise: str | None, code: int, tmp_path: Path) -> None:
    done = compress("report", written(tmp_path, sample_report(fidelity(), gates, noise=noise)), "--json")
    assert done.returncode == json.loads(done.stdout)["exit_code"] == code


def test_every_format_on_stdout(output: Path) -> None:
    def shown(format: str) -> str:
        done = compress("report", output / "report" / "report.json", "--format", format)
        assert done.returncode == 3
        assert done.stderr == ""
        return done.stdout

    assert shown("md").startswith("<!-- compress-report -->")
    assert shown("html").startswith("<!DOCTYPE html>")
    assert ElementTree.fromstring(shown("junit").encode()).tag == "testsuites"
    assert json.loads(shown("metrics"))["verdict"] == "FAIL"
    assert shown("json") == (output / "report" / "report.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("format", ["text", "md", "junit"])
def test_into_a_file(format: str, output: Path) -> None:
    file = output / "again"
    done = compress("report", output, "--format", format, "-o", file)
    assert (done.returncode, done.stdout) == (3, "")
    assert "FAIL" in file.read_text(encoding="utf-8")
    assert "\x1b" not in file.read_text(encoding="utf-8")


def test_json_is_one_object_with_the_verdict(output: Path) -> None:
    done = compress("report", output, "--json", "--format", "md")
    data = json.loads(done.stdout)
    assert data["verdict"]["outcome"] == "FAIL"
    assert data["report"] == str(output / "report" / "report.json")
    assert len(data["measurements"]) == len(task_report().measurements)


def test_bad_reports_get_one_line_and_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    text = report_json(sample_report())
    for content, code, words in (
        (text[:999], 2, "truncated"),
        (text.replace('"schema_version": 2', '"schema_version": 7'), 2, "schema version 7"),
        ("{}", 2, "no report of compress"),
        (None, 9, "No such file"),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        done = compress("report", path)
        assert (done.returncode, done.stdout) == (code, "")
        assert words in done.stderr
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_written(output: Path) -> None:
    done = compress("report", output, "-o", output)
    assert done.returncode == 9
    assert "cannot be written" in done.stderr


def test_usage_errors_give_no_commands_to_a_ci_system(tmp_path: Path) -> None:
    for arguments in (("report", "x\n::error::y"), ("\n::error::y",), ("report", "x", "--format", "\n##[error]y")):
        done = compress(*arguments)
        assert done.returncode in (2, 9)
        assert not any(line.strip().startswith("::") for line in done.stderr.splitlines())
        assert "##[" not in done.stderr


def test_the_schema_of_reports_is_the_committed_one() -> None:
    done = compress("schema", "--report")
    assert done.returncode == 0
    assert done.stdout == (ROOT / "recipes" / "report.schema.json").read_text(encoding="utf-8")
