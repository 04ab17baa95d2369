"""NaN and infinite weights are found before anything long begins, all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from compress.errors import BrokenResultError
from compress.model.checkpoint import open_checkpoint
from compress.model.finite import check_finite
from compress.progress import Silent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_broken_tensor_is_named_with_its_count(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", dtype=dtype)
    check_finite(open_checkpoint(folder), Silent())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:3] = float("nan")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("-inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenResultError) as caught:
        check_finite(open_checkpoint(folder), Silent())
    assert "model.norm.weight: 3 of 64 values" in str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight: 1 of 8192 values" in str(caught.value)
    assert "down_proj" not in str(caught.value)


def test_numbers_of_eight_bits_are_looked_at_too(tmp_path: Path) -> None:
    """`compress eval` reads FP8 folders."""
    folder = tiny.tiny_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    check_finite(open_checkpoint(folder), Silent())
    tensors[name][0, :2] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenResultError, match=r"up_proj.weight: 2 of 8192 values"):
        check_finite(open_checkpoint(folder), Silent())
