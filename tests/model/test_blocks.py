from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_more
import torch
from safetensors.torch import load_file, save_file

from compress.model.anatomy import anatomy
from compress.model.blocks import BlockModel, run_block
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original

IDS = torch.arange(20, 60)


def _by_blocks(folder: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    model = BlockModel(checkpoint, anatomy(checkpoint), dtype=torch.float32, device="cpu")
    hidden, calls = model.inputs(IDS)
    for index, call in enumerate(calls):
        with model.block(index) as block:
            hidden = run_block(block, hidden, call)
    return hidden


def test_layer_norms_under_their_first_names(tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "LayerNorm" in name]:  # away from 1 and 0, so that a lost one shows
        weights[name] = torch.randn_like(weights[name])
    save_file(weights, folder / "model.safetensors")
    today = _by_blocks(folder)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    save_file(old, folder / "model.safetensors")
    assert torch.equal(_by_blocks(folder), today)
    stock = load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        assert torch.allclose(stock(input_ids=IDS[None])[0], today, atol=1e-5)


@pytest.mark.parametrize("make", [tiny_more.tiny_mpnet, tiny_more.tiny_modernbert], ids=lambda make: make.__name__)
def test_blocks_that_return_tuples_or_are_asked_for_attributes(make, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", num_hidden_layers=4)
    stock = load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")
    hidden = _by_blocks(folder)
    with torch.no_grad():
        found = stock.final_norm(hidden) if hasattr(stock, "final_norm") else hidden
        assert torch.allclose(stock(input_ids=IDS[None])[0], found, atol=1e-5)


def test_a_bare_model_without_pooler(tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path / "model")
    whole = _by_blocks(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "pooler" not in name}, folder / "model.safetensors")
    assert torch.equal(_by_blocks(folder), whole)
