from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from compress.cli import doctor as doctor_module
from compress.cli.boundary import run_guarded
from compress.cli.doctor import doctor, doctor_text, loaders
from compress.cli.terminal import Terminal
from compress.plan.extras import FORMAT_LOADERS, PACKAGES, Package, PackageState, check_package
from compress.plan.machine import Gpu, Machine
from compress.scheme import TARGETS

HERE = Machine(
    system="Linux 6.1.0",
    architecture="x86_64",
    cpu="AMD EPYC 9654 96-Core Processor",
    physical_cores=96,
    logical_cores=192,
    usable_cores=2.5,
    instruction_sets=("avx2", "avx512f", "avx512_vnni", "avx512_bf16"),
    memory_total=24_000_000_000,
    memory_available=20_500_000_000,
    disk_path="/work",
    disk_free=64_000_000_000,
    gpus=(Gpu("NVIDIA H200", 150_000_000_000, "570.1"),),
)


def all_working() -> list[PackageState]:
    return [PackageState(package, "1.0") for package in PACKAGES]


def broken(name: str, reason: str) -> list[PackageState]:
    return [PackageState(s.package, "1.0", reason) if s.package.name == name else s for s in all_working()]


def shown(states: list[PackageState], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(doctor_text(HERE, states))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert max(map(len, text.splitlines())) <= width
    return str(text)


def test_shows_the_machine() -> None:
    text = shown(all_working())
    assert "AMD EPYC 9654 96-Core Processor" in text
    assert "avx512_vnni" in text
    assert "2.5 usable (96 physical, 192 logical)" in text
    assert "NVIDIA H200 (150 GB)" in text
    assert "20.5 GB free of 24.0 GB" in text


def test_shows_every_target_and_format() -> None:
    text = shown(all_working(), width=120)
    for target in TARGETS.values():
        for name in target.formats:
            assert any(line.split()[:2] == [target.name, name] for line in text.splitlines())


def test_a_missing_package_costs_its_loader_and_names_the_pip_line() -> None:
    states = [PackageState(s.package, None) if s.package.name == "vllm" else s for s in all_working()]
    assert loaders("gptq", states) == {"transformers": [], "vLLM": ["vllm"]}
    assert "pip install vllm" in shown(states)


def test_a_broken_package_is_reported_with_its_reason() -> None:
    states = broken("gptqmodel", "ImportError: libcudart.so.12: cannot open shared object file")
    text = shown(states)
    assert "BROKEN" in text
    assert "libcudart.so.12" in text
    assert loaders("gptq", states)["transformers"] == ["gptqmodel"]


def test_every_format_that_can_be_written_has_its_loaders() -> None:
    names = {package.name for package in PACKAGES}
    for target in TARGETS.values():
        for format_name in target.formats:
            for needed in FORMAT_LOADERS[format_name].values():
                assert set(needed) <= names


def test_check_package_survives_a_package_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_extra.py").write_text("raise ImportError('libfoo.so is missing')")
    info = tmp_path / "broken_extra-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-extra\nVersion: 2.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    state = check_package(Package("broken-extra", "broken_extra", "nothing", "pip install broken-extra"))
    assert state.version == "2.0"
    assert state.broken == "ImportError: libfoo.so is missing"
    assert not state.works
    assert "broken_extra" not in sys.modules


def test_json_through_the_boundary(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(package for package in PACKAGES if package.name in ("safetensors", "vllm"))
    monkeypatch.setattr(doctor_module, "PACKAGES", few)
    monkeypatch.setattr(doctor_module, "check_packages", lambda **_: tuple(map(check_package, few)))
    terminal = Terminal(json=True)
    assert run_guarded(terminal, lambda: doctor(terminal)) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["exit_code"] == 0
    assert data["doctor"]["packages"][0]["name"] == "safetensors"
    assert data["doctor"]["packages"][0]["works"] is True
    assert data["doctor"]["machine"]["cpu"]
