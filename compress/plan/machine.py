"""What this machine is, asked from the operating system and never from torch.

Numbers are what this process may use: a container with two cores and 4 GB on a 64-core host is a machine with
two cores and 4 GB.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

INSTRUCTION_SETS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
"""The flags of /proc/cpuinfo that decide how fast low-precision arithmetic is (x86, then Arm)."""

CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it; memory in bytes."""

    name: str
    memory_total: int
    driver: str


@dataclass(frozen=True)
class Machine:
    """Attributes:
    usable_cores: what affinity and the container's CPU quota leave of the logical cores; may be a fraction.
    instruction_sets: those of INSTRUCTION_SETS that the CPU has; empty where the system does not tell.
    memory_total, memory_available: bytes, a container's limit counted.
    disk_free: bytes free to this user where `disk_path` is.
    gpus: None when they were not asked for.
    """

    system: str
    architecture: str
    cpu: str
    physical_cores: int | None
    logical_cores: int
    usable_cores: float
    instruction_sets: tuple[str, ...]
    memory_total: int
    memory_available: int
    disk_path: str
    disk_free: int
    gpus: tuple[Gpu, ...] | None

    def limited(self, memory: int | None) -> Machine:
        """The same machine with at most `memory` bytes free; None for all that are."""
        return self if memory is None else replace(self, memory_available=min(self.memory_available, memory))


def machine(disk: Path | None = None, *, gpus: bool = False) -> Machine:
    """Looks at the machine. `disk` is the folder whose file system is asked (default: the working directory)."""
    import psutil

    cpuinfo = read_text(Path("/proc/cpuinfo"))
    memory = psutil.virtual_memory()
    limit = memory_limit()
    place = nearest_existing(disk or Path.cwd())
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cpu=cpu_name(cpuinfo),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        instruction_sets=instruction_sets(cpuinfo),
        memory_total=min(memory.total, limit or memory.total),
        memory_available=min(memory.available, limit or memory.available),
        disk_path=str(place),
        disk_free=shutil.disk_usage(place).free,
        gpus=nvidia_gpus() if gpus else None,
    )


def cpu_name(cpuinfo: str) -> str:
    """The model name in the text of /proc/cpuinfo, else what `platform` knows."""
    return cpuinfo_value(cpuinfo, "model name") or platform.processor() or platform.machine() or "unknown"


def instruction_sets(cpuinfo: str) -> tuple[str, ...]:
    """Those of INSTRUCTION_SETS that the text of /proc/cpuinfo lists ("flags" on x86, "Features" on Arm)."""
    flags = set((cpuinfo_value(cpuinfo, "flags") or cpuinfo_value(cpuinfo, "Features") or "").split())
    return tuple(name for name in INSTRUCTION_SETS if name in flags)


def cpuinfo_value(cpuinfo: str, key: str) -> str | None:
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return value.strip()
    return None


def usable_cores() -> float:
    """Cores this process may use: its affinity, cut by the container's CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in cgroup_folders() if (quota := cpu_quota(folder)) is not None]
    return min([float(affinity), *quotas])


def cgroup_folders() -> list[Path]:
    """The cgroup (version 2) of this process and its parents, the limits of all of which hold."""
    for line in read_text(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            folder = CGROUP_ROOT / line.removeprefix("0::").strip().lstrip("/")
            return [folder, *(parent for parent in folder.parents if parent.is_relative_to(CGROUP_ROOT))]
    return []


def cpu_quota(folder: Path) -> float | None:
    """Cores allowed by `cpu.max` ("200000 100000" is 2), or None without a limit."""
    words = read_text(folder / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def memory_limit() -> int | None:
    """The smallest `memory.max` of this process's cgroups, in bytes; None without one."""
    texts = [read_text(folder / "memory.max").strip() for folder in cgroup_folders()]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def nvidia_gpus() -> tuple[Gpu, ...]:
    """The GPUs nvidia-smi lists; none where it is missing, fails or hangs."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    return tuple(Gpu(row[0], int(row[1]) * 2**20, row[2]) for row in rows if len(row) == 3 and row[1].isdigit())


def nearest_existing(path: Path) -> Path:
    """`path` or the closest parent that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def read_text(path: Path) -> str:
    """The text of a system file, or "" where there is none (other systems, containers)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
