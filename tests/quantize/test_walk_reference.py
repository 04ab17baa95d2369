"""The walk, where all windows stop inside a block, against whole models that start anew for every group of layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from walking import Chosen, Walked, everything, reference, walk, windows

from compress.quantize.gptq import GptqSettings

MODELS = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "olmo2",
    "phi3",
    "gpt_neox",
    "gemma",
    "gemma2",
    "gemma3",
    "opt",
    "gpt2",
    "bert",
    "roberta",
    "distilbert",
]
PLAIN = GptqSettings(asymmetric=False, refit_scales=False, local_search=0)
SETTINGS = {"plain": PLAIN, "all": GptqSettings()}


def check(folder: Path, ids: list[torch.Tensor], settings: GptqSettings, chosen: Chosen = everything) -> Walked:
    """Sums over tokens are taken in another order, so a rare code may sit on the other side of a tie."""
    found = walk(folder, ids, settings, chosen=chosen)
    expected = reference(folder, ids, settings, found.weights, chosen)
    assert list(found.weights) == list(expected)
    for layer, weight in expected.items():
        assert (found.weights[layer].codes == weight.codes).float().mean() > 0.98, layer
        close = torch.isclose(found.weights[layer].scale, weight.scale, rtol=1e-3)
        assert close.float().mean() > 0.95, layer
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_one_pass_equals_whole_models(name: str, settings: str, tmp_path: Path) -> None:
    folder = getattr(tiny, f"tiny_{name}")(tmp_path / name)
    ids = [window[: 48 - 5 * index] for index, window in enumerate(windows())]
    found = check(folder, ids, SETTINGS[settings])
    assert [record.name for record in found.records] == list(found.weights)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "bert", "roberta", "distilbert"])
@pytest.mark.parametrize("skipped", ["first", "last", "whole groups"])
def test_members_of_a_group_that_are_skipped(name: str, skipped: str, tmp_path: Path) -> None:
    """The windows stop in front of the first member that is called, whichever is left."""
    folder = getattr(tiny, f"tiny_{name}")(tmp_path / name)
    left_out = {
        "first": ("q_proj", "query", "gate_proj"),
        "last": ("v_proj", "value", "up_proj"),
        "whole groups": ("o_proj", "out_proj", "attn.c_proj", "attention.output.dense", "layers.0.mlp.down_proj"),
    }[skipped]
    found = check(folder, windows(3), GptqSettings(), lambda layer: not layer.name.endswith(left_out))
    assert not any(name.endswith(left_out) for name in found.weights)


def test_a_block_without_layers_is_passed_through(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=3)
    found = check(folder, windows(3), GptqSettings(), lambda layer: layer.block != 1)
    assert found.parts == ["block-00000", "block-00001", "block-00002"]
