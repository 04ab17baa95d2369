from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_report import sample_report, task_report

from compress.errors import CompressError, MissingResourceError, UsageError
from compress.report.read import read_report
from compress.report.schema import report_json

TEXT = report_json(task_report())


def edited(**changes: Any) -> str:
    return json.dumps(json.loads(TEXT) | changes)


def refused(path: Path, kind: type[CompressError] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        read_report(path)
    assert caught.value.hint
    assert caught.value.exit_code == kind.exit_code
    return caught.value.message


def test_a_file_its_folder_and_the_output_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "report"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(TEXT)
    for path in (folder / "report.json", folder, folder.parent, str(folder.parent)):
        assert read_report(path) == task_report()


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "nowhere", MissingResourceError)
    assert "neither report.json nor report/report.json" in refused(tmp_path, MissingResourceError)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_a_path_that_cannot_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(CompressError):
        read_report(tmp_path / name)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.9999])
def test_a_truncated_report(share: float, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(TEXT[: int(len(TEXT.rstrip()) * share)])
    message = refused(path)
    assert message.startswith(f"{path}:")
    assert "truncated" in message or "no JSON" in message


@pytest.mark.parametrize("text", ["", "[]", "3", "null", '"report"', "{}", '{"schema_version": 2}', "\ufeffnot json"])
def test_what_is_no_report(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    assert str(path) in refused(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe\x00{")
    assert "byte 0 is no UTF-8" in refused(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema_version": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_hold(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    refused(path)


@pytest.mark.parametrize("version", [1, 3, "2", 2.0, True, None, [2]])
def test_another_version_is_named_with_ours(version: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(edited(schema_version=version, tool={"name": "compress", "version": "9.9"}))
    message = refused(path)
    assert f"schema version {version!r}, written by compress 9.9" in message
    assert "reads version 2" in message


def test_every_fault_is_named_with_its_place(tmp_path: Path) -> None:
    data = json.loads(TEXT)
    data["measurements"][3]["value"] = "many"
    del data["output"]
    data["extra"] = 1
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    message = refused(path)
    for place in (": measurements[3].value: ", ": output: ", ": extra: "):
        assert place in message
    assert len(message.splitlines()) == 3


def test_nan_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(TEXT.replace('"value": 0.07812', '"value": NaN'))
    assert "NaN is no JSON" in refused(path)


@pytest.mark.parametrize(
    "changes", [{"outcome": "PASS", "exit_code": 0}, {"exit_code": 0}, {"outcome": "PASS"}, {"exit_code": 77}]
)
def test_a_report_made_green_by_hand_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(edited(verdict=json.loads(TEXT)["verdict"] | changes))
    assert "contradict" in refused(path)


def test_text_is_made_visible_again(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(edited(output="a\x1b\ud800"))
    assert read_report(path).output == "a\\x1b\\ud800"


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = sample_report()
    path.write_text(report_json(report))
    assert report_json(read_report(path)) == report_json(report)
