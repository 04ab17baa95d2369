"""The software and hardware a run had, for the report."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from compress.plan.extras import PACKAGES, version_of
from compress.plan.machine import machine


def environment() -> dict[str, Any]:
    """Versions, CPU, threads, memory (bytes) and GPUs. Torch is asked only when the run has imported it."""
    here = machine(gpus=True)
    extras = {package.name: version_of(package.name) for package in PACKAGES if not package.base}
    return {
        "versions": versions() | {name: version for name, version in extras.items() if version is not None},
        "platform": platform.platform(),
        "cpu": here.cpu,
        "instruction_sets": list(here.instruction_sets),
        "cores": {
            "physical": here.physical_cores,
            "logical": here.logical_cores,
            "usable": here.usable_cores,
        },
        "threads": threads(),
        "memory_total_bytes": here.memory_total,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_total} for gpu in here.gpus or ()],
    }


def versions() -> dict[str, str]:
    """Python and the packages that a result's bytes can depend on, by name."""
    names = ("numpy", *(package.name for package in PACKAGES if package.base))
    found = {name: version_of(name) for name in sorted(names)}
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}


def threads() -> dict[str, int | str | None]:
    """Threads torch computes with (None when torch is not loaded) and OMP_NUM_THREADS as set."""
    torch = sys.modules.get("torch")
    return {
        "torch": torch.get_num_threads() if torch is not None else None,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }
