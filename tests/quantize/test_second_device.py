"""A second device: one block's weights and windows move there and off again, and nothing of them stays.

It is the CPU under another name. What is moved there is copied, and known as long as it lives.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from walking import SCHEME, walk, windows

from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.progress import Silent
from compress.quantize.block import WalkSettings
from compress.quantize.gptq import GptqSettings
from compress.quantize.layer import LayerPlan
from compress.quantize.walk import quantize_blocks, quantize_nearest_all
from compress.scheme import QuantizedWeight

NAME, DEPTH = "cpu:0", 4


class SecondDevice:
    """Attributes:
    moved: shapes of all tensors that were moved there, in order.
    most: the most bytes of matrices that were there together.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._there: list[tuple[weakref.ref[torch.Tensor], tuple[int, ...], int]] = []
        self.moved: list[tuple[int, ...]] = []
        self.most = 0
        real = torch.Tensor.to

        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if NAME not in (args[:1] or (kwargs.get("device"),)):
                return real(tensor, *args, **kwargs)
            copied = real(tensor, *args, **kwargs).clone()
            self._there.append((weakref.ref(copied), tuple(copied.shape), copied.nbytes))
            self.moved.append(tuple(copied.shape))
            self.most = max(self.most, self.bytes_of_matrices())
            return copied

        monkeypatch.setattr(torch.Tensor, "to", to)

    def alive(self) -> list[tuple[tuple[int, ...], int]]:
        return [(shape, nbytes) for tensor, shape, nbytes in self._there if tensor() is not None]

    def bytes_of_matrices(self) -> int:
        return sum(nbytes for shape, nbytes in self.alive() if len(shape) == 2)


def block_bytes(folder: Path) -> int:
    layers = anatomy(open_checkpoint(folder)).layers
    return sum(layer.parameters * 4 for layer in layers) // DEPTH


@pytest.mark.parametrize("one_pass", [True, False])
def test_a_block_moves_there_and_off_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_pass: bool) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=DEPTH)
    straight = walk(folder, windows(3), one_pass=one_pass)
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    plans = [LayerPlan(layer, SCHEME, "int4", "gptq", torch.float32) for layer in parts.layers]
    device, found, left = SecondDevice(monkeypatch), dict[str, QuantizedWeight](), []

    def save(_part: str, weights: Mapping[str, QuantizedWeight], *_more: object) -> None:
        gc.collect()
        left.append([shape for shape, _ in device.alive() if len(shape) >= 2])
        found.update(weights)

    settings = WalkSettings(GptqSettings(), 1, torch.float32, NAME, one_pass=one_pass)
    quantize_blocks(checkpoint, parts, plans, windows(3), settings, save, Silent())
    assert left == [[]] * DEPTH
    size = block_bytes(folder)
    embeddings = checkpoint.tensors["model.embed_tokens.weight"].shape[0] * 64 * 4
    assert max(size, embeddings) <= device.most < 2 * size + embeddings < DEPTH * size
    for layer in parts.layers:  # the block's own, and once more to be quantized
        alike = [other for other in parts.layers if (other.out, other.width) == (layer.out, layer.width)]
        assert device.moved.count((layer.out, layer.width)) >= 2 * len(alike)
    assert sum(len(shape) == 3 for shape in device.moved) >= 3 * 2 * DEPTH  # every window, in both streams
    same = [(found[name].codes == weight.codes).float().mean() for name, weight in straight.weights.items()]
    assert torch.stack(same).mean() > 0.99  # sums are taken in another order there


def test_rounding_moves_rows_there_and_off_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=DEPTH)
    checkpoint = open_checkpoint(folder)
    plans = [LayerPlan(layer, SCHEME, "int4", "rtn", torch.float32) for layer in anatomy(checkpoint).layers]
    device, left = SecondDevice(monkeypatch), []

    def save(*_given: object) -> None:
        gc.collect()
        left.append(device.alive())

    quantize_nearest_all(checkpoint, plans, save, Silent(), NAME)
    assert left == [[]] * len(plans)
    assert device.moved == [(plan.layer.out, plan.layer.width) for plan in plans]
