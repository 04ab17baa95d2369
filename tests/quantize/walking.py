"""The walk over a folder, and the same thing done the obvious way: whole models that start anew for every group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress.model.anatomy import Anatomy, LinearLayer, anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent
from compress.quantize.block import WalkSettings
from compress.quantize.gptq import GptqSettings, gptq, prepare
from compress.quantize.layer import LayerPlan
from compress.quantize.statistics import Statistics
from compress.quantize.walk import quantize_blocks
from compress.records import LayerRecord
from compress.scheme import QuantizedWeight, Scheme

SCHEME = Scheme(4, 32)
Chosen = Callable[[LinearLayer], bool]


def windows(count: int = 4, length: int = 48) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (length,), generator=generator) for _ in range(count)]


def everything(_layer: LinearLayer) -> bool:
    return True


def edit(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    """Changes one tensor of the folder's only shard in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass
class Walked:
    """Everything that a walk hands out."""

    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    records: list[LayerRecord] = field(default_factory=list)


def walk(
    folder: Path,
    ids: Sequence[torch.Tensor],
    settings: GptqSettings | None = None,
    *,
    scheme: Scheme = SCHEME,
    chosen: Chosen = everything,
    **more: Any,
) -> Walked:
    """`quantize_blocks` over the chosen layers in float32; `more` are fields of WalkSettings."""
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    plans = [LayerPlan(layer, scheme, "int4", "gptq", torch.float32) for layer in parts.layers if chosen(layer)]
    found = Walked()

    def save(part: str, weights: Mapping[str, QuantizedWeight], *_more: object) -> None:
        found.parts.append(part)
        found.weights.update(weights)

    fields = {"batch_size": 1, "compute_dtype": torch.float32, "device": "cpu"} | more
    found.records = quantize_blocks(
        checkpoint, parts, plans, ids, WalkSettings(settings or GptqSettings(), **fields), save, Silent()
    )
    return found


class WholeModel:
    """A stock model in memory, asked what single modules get."""

    def __init__(self, folder: Path) -> None:
        self.model = load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")

    def module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def inputs(self, name: str, ids: Sequence[torch.Tensor]) -> torch.Tensor:
        """What module `name` gets for all windows, [tokens, width]."""
        kept: list[torch.Tensor] = []

        def keep(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            kept.append(args[0].reshape(-1, args[0].shape[-1]))

        handle = self.module(name).register_forward_pre_hook(keep)
        with torch.no_grad():
            for window in ids:
                self.model(input_ids=window.unsqueeze(0))
        handle.remove()
        return torch.cat(kept)


def reference(
    folder: Path,
    ids: Sequence[torch.Tensor],
    settings: GptqSettings,
    found: Mapping[str, QuantizedWeight],
    chosen: Chosen = everything,
) -> dict[str, QuantizedWeight]:
    """What each group should be, given what was found for the groups before it.

    For every group runs the model with the weights found so far, and the original model, from the start. Taking the
    found weights and not the expected ones keeps a code that fell to the other side of a tie from growing.
    """
    parts = anatomy(open_checkpoint(folder))
    model, original = WholeModel(folder), WholeModel(folder)
    expected: dict[str, QuantizedWeight] = {}
    layers = [layer for layer in parts.layers if chosen(layer)]
    for group in dict.fromkeys(layer.fused for layer in layers):
        members = [layer for layer in layers if layer.fused == group]
        prepared = prepare(_statistics(model, original, parts, members[0], ids), settings)
        for layer in members:
            weight = model.module(layer.name).weight
            assert isinstance(weight, torch.Tensor)
            W = (weight.detach().T if layer.transposed else weight.detach()).contiguous()
            result = gptq(W, prepared, SCHEME, scale_dtype=torch.float32, settings=settings)
            expected[layer.name] = result.weight
            dense = found[layer.name].dequantize(torch.float32)
            with torch.no_grad():
                weight.copy_(dense.T if layer.transposed else dense)
    return expected


def _statistics(
    model: WholeModel, original: WholeModel, parts: Anatomy, first: LinearLayer, ids: Sequence[torch.Tensor]
) -> Statistics:
    x, there = model.inputs(first.name, ids), original.inputs(first.name, ids)
    count = len(x)
    path = dict(parts.architecture.residuals).get(first.fused.partition(":")[2])
    drift = None
    if path is not None:
        name = f"{parts.block_name(first.block)}.{path}".removesuffix(".")
        drift = (original.inputs(name, ids) - model.inputs(name, ids)).T @ x / count
    return Statistics(x.T @ x / count, (there - x).T @ x / count, drift, count)
