from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compress.plan import machine as machine_module
from compress.plan.machine import cpu_name, cpu_quota, instruction_sets, machine, nearest_existing, nvidia_gpus

CPUINFO = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse avx avx2 avx512f avx512_vnni amx_tile amx_int8
"""


def test_machine_is_consistent() -> None:
    here = machine()
    assert 0 < here.usable_cores <= here.logical_cores
    assert 0 < here.memory_available <= here.memory_total
    assert here.disk_free > 0
    assert here.cpu
    assert here.gpus is None


def test_reads_proc_cpuinfo() -> None:
    assert cpu_name(CPUINFO) == "Intel(R) Xeon(R) Platinum 8480+"
    assert instruction_sets(CPUINFO) == ("avx2", "avx512f", "avx512_vnni", "amx_tile", "amx_int8")


def test_reads_arm_features() -> None:
    assert instruction_sets("Features\t: fp asimd asimddp i8mm\n") == ("asimd", "asimddp", "i8mm")


def test_a_system_without_cpuinfo_still_has_a_name() -> None:
    assert cpu_name("")
    assert instruction_sets("") == ()


@pytest.mark.parametrize(("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_container_quota(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == cores


def test_the_smallest_limit_of_all_parents_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "memory.max").write_text("1000000\n")
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "outer" / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(machine_module, "cgroup_folders", lambda: [inner, tmp_path / "outer", tmp_path])
    assert machine().memory_total == 1000000
    assert machine().usable_cores == 0.5


def test_no_nvidia_smi_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert nvidia_gpus() == ()


def test_reads_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 570.86'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (gpu,) = nvidia_gpus()
    assert (gpu.name, gpu.memory_total, gpu.driver) == ("NVIDIA H200", 143771 * 2**20, "570.86")


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path


def test_needs_no_torch() -> None:
    code = (
        "import sys; import compress.plan.machine, compress.plan.extras, compress.report.environment; "
        "compress.report.environment.environment(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
