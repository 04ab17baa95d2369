"""Experts as linear layers: what calibration walks through, and where a stock model holds an expert's matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from compress.model.moe import Experts


class LinearExperts(nn.Module):
    """The experts of a block as three nn.Linear each, with the outputs of the stock class that stacks them.

    Every expert is called for every window, also with the no rows of one that no token was sent to: so all windows
    come to the same layers in the same order. Parameters are created on the meta device.
    """

    def __init__(self, stock: nn.Module, experts: Experts) -> None:
        stacked = cast(torch.Tensor, stock.gate_up_proj)  # [experts, 2 * inner, hidden]
        count, rows, hidden = stacked.shape
        super().__init__()
        for index in range(count):  # as children of their own, so that names are those of the file: "experts.3.w1"
            self.add_module(str(index), _expert(experts, hidden, rows // 2, stacked.dtype))
        self._count, self._names = count, (experts.gate, experts.up, experts.down)
        self._activation = cast(nn.Module, stock.act_fn)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Sum over the chosen experts of share * down(act(gate(x)) * up(x)).

        Args:
            hidden: x, [T, hidden].
            chosen: int64 [T, k], the experts of each token.
            shares: [T, k], what each of them counts.

        Returns:
            [T, hidden].
        """
        total = torch.zeros_like(hidden)
        for index in range(self._count):
            gate, up, down = (self.get_submodule(f"{index}.{name}") for name in self._names)
            tokens, place = torch.where(chosen == index)
            x = hidden[tokens]
            inner = self._activation(gate(x)) * up(x)
            found = down(inner) * shares[tokens, place, None]
            total.index_add_(0, tokens, found.to(total.dtype))
        return total


def linearise(block: nn.Module, experts: Experts) -> None:
    """Replaces the stock experts of a block by `LinearExperts` without values; their names follow the file's."""
    parent, _, last = experts.module.rpartition(".")
    holder = block.get_submodule(parent)
    setattr(holder, last, LinearExperts(cast(nn.Module, getattr(holder, last)), experts))


def exact_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts stacked experts that stock loading left in another dtype than was asked for: that of the scales in a
    compressed-tensors folder. Products would be rounded to it, so two models with equal weights would not answer alike.
    """
    for module in model.modules():
        if {"gate_up_proj", "down_proj"} <= module._parameters.keys():
            module.to(dtype)


def expert_weight(modules: Mapping[str, nn.Module], name: str, experts: Experts) -> torch.Tensor | None:
    """The matrix [out, in] that the file calls `name`, out of a stock model's stacked tensors; None if it has none.

    Args:
        modules: of the model, by name.
        name: without ".weight", with the base model's prefix as in `modules`.
    """
    stem, found, rest = name.rpartition(f"{experts.path}.")
    index, _, part = rest.partition(".")
    stock: Any = modules.get(stem + experts.module)
    if not found or stock is None or not index.isdecimal() or int(index) >= len(stock.down_proj):
        return None
    gate, up = stock.gate_up_proj[int(index)].chunk(2)
    return {experts.gate: gate, experts.up: up, experts.down: stock.down_proj[int(index)]}.get(part)


def _expert(experts: Experts, hidden: int, inner: int, dtype: torch.dtype) -> nn.ModuleDict:
    def linear(width: int, out: int) -> nn.Linear:
        return nn.Linear(width, out, bias=False, device="meta", dtype=dtype)

    return nn.ModuleDict(
        {experts.gate: linear(hidden, inner), experts.up: linear(hidden, inner), experts.down: linear(inner, hidden)}
    )
