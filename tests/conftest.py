"""Paths, seeds and threads shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives
    torch.manual_seed(0)
