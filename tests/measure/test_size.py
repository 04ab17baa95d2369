from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama

from compress.measure.size import bits_per_weight, size_measurements
from compress.model.checkpoint import open_checkpoint


def test_sizes_are_the_bytes_of_the_weight_files(tmp_path: Path) -> None:
    original = tiny_llama(tmp_path / "original")
    result = tiny_llama(tmp_path / "result", dtype=torch.bfloat16)
    # A stray copy that no loader reads (Mistral's repositories hold one) is not part of the model.
    (original / "consolidated.safetensors").write_bytes((original / "model.safetensors").read_bytes())
    found = {
        (one.metric, one.subject): one.value
        for one in size_measurements(
            open_checkpoint(original),
            open_checkpoint(result),
            original_parameters=100,
            result_parameters=90,
            quantized_bytes=4500,
            quantized_parameters=8000,
        )
    }
    bytes_original = (original / "model.safetensors").stat().st_size
    bytes_result = (result / "model.safetensors").stat().st_size
    assert found == {
        ("size", "original"): bytes_original / 1e6,
        ("size", "result"): bytes_result / 1e6,
        ("size.ratio", "result/original"): bytes_result / bytes_original,
        ("parameters", "original"): 100,
        ("parameters", "result"): 90,
        ("bits_per_weight", "result"): 4.5,
    }


def test_without_quantized_layers_there_are_no_bits() -> None:
    found = bits_per_weight(0, 0)
    assert found.value is None
    assert found.note == "no layer is quantized"
    with pytest.raises(ValueError):
        bits_per_weight(10, 0)
    with pytest.raises(ValueError):
        bits_per_weight(-1, 10)


def test_no_torch_is_imported() -> None:
    code = "import sys, compress.measure.size; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
