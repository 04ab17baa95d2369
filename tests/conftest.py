"""Paths, seeds and threads shared by all tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "report")]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives
    torch.manual_seed(0)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a given size ("200k") and returns its folder; skips where that needs more rights."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(size: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False, capture_output=True
        )
        if done.returncode:
            pytest.skip("a small tmpfs cannot be mounted here (needs root)")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # weights may still be mapped


@pytest.fixture
def small_disk(mounted: Callable[[str], Path]) -> Path:
    """A file system of 200 kB, which the parts of a tiny model already fill."""
    return mounted("200k")
