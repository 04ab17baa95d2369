from __future__ import annotations

import json
import sys

import pytest

from compress.report.environment import environment, versions


def test_environment_is_json_and_complete() -> None:
    found = environment()
    assert json.loads(json.dumps(found)) == found
    for name in ("python", "torch", "transformers", "compressed-tensors", "safetensors", "numpy"):
        assert found["versions"][name]
    assert found["cpu"]
    assert found["cores"]["usable"] > 0
    assert found["memory_total_bytes"] > 0


def test_torch_s_threads_are_told_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert environment()["threads"]["torch"] == torch.get_num_threads()
    monkeypatch.delitem(sys.modules, "torch")
    assert environment()["threads"]["torch"] is None


def test_versions_leave_extras_out() -> None:
    assert "vllm" not in versions()
