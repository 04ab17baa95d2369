"""The whole original model in memory, whose blocks can be run one by one.

Every block is called as it is at its own place (mask and positions by the kind of layer), also where blocks in front of
it are left out: what a model with fewer layers would compute, since the kinds go with their layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from compress.model.anatomy import Anatomy, LinearLayer
from compress.model.blocks import Call, Recorder, replaced
from compress.model.checkpoint import Checkpoint
from compress.model.load import load_original
from compress.model.prunable import Unit, output_of


def output_projections(anatomy: Anatomy) -> tuple[LinearLayer, ...]:
    """The attention's and the feed-forward network's output of every block, block by block."""
    units: tuple[Unit, ...] = ("heads", "ffn")
    return tuple(output_of(anatomy, block, unit) for block in range(anatomy.depth) for unit in units)


class WholeModel:
    """Attributes:
    model: float32, in eval mode, its parameters without gradients.
    blocks: its list of blocks.
    """

    def __init__(self, checkpoint: Checkpoint, anatomy: Anatomy, *, device: str) -> None:
        self.model = load_original(checkpoint, dtype=torch.float32, device=device)
        self._anatomy, self._device = anatomy, device
        blocks = self.model.get_submodule(anatomy.blocks[0].rpartition(".")[0])
        assert isinstance(blocks, nn.ModuleList)
        self.blocks = blocks

    def projection(self, layer: LinearLayer) -> nn.Module:
        """The module of an output projection."""
        return self.model.get_submodule(layer.name)

    def enter(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
        """Hidden states [1, T, d] in front of block 0 for ids [T], and the call of every block."""
        recorders = self._recorders()
        with torch.no_grad(), replaced(self.blocks, recorders):
            self.base(ids)
        hidden, calls = recorders[0].hidden, [one.call for one in recorders if one.call is not None]
        if hidden is None or len(calls) != len(recorders):
            raise RuntimeError(f"{self._anatomy.model_type}: the forward pass did not visit every block")
        return hidden, calls

    def leave(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """What the model answers if `hidden` [1, T, d] comes out of its last block: see `answer`."""
        recorders = self._recorders()
        handed = (hidden,) if self._anatomy.architecture.tuples else hidden
        recorders[-1].register_forward_hook(lambda *_call: handed)
        with torch.no_grad(), replaced(self.blocks, recorders):
            return self.answer(ids, positions)

    def answer(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [P, V] of a decoder at `positions` (int64 [P], all for None); last states [T, d] of an encoder."""
        if self._anatomy.kind != "decoder":
            states: torch.Tensor = self.base(ids).last_hidden_state
            return states[0]
        some: dict[str, Any] = {} if positions is None else {"logits_to_keep": positions.to(self._device)}
        logits: torch.Tensor = self.model(input_ids=ids.unsqueeze(0).to(self._device), use_cache=False, **some).logits
        return logits[0]

    def without(self, removed: Collection[int]) -> Sequence[nn.Module]:
        """The blocks with stand-ins that hand their input on in the places of some; for `blocks.replaced`."""
        stand_ins = self._recorders()
        return [stand_ins[index] if index in removed else block for index, block in enumerate(self.blocks)]

    def base(self, ids: torch.Tensor) -> Any:
        anatomy = self._anatomy
        base = self.model.get_submodule(anatomy.architecture.base) if anatomy.module_prefix else self.model
        return base(input_ids=ids.unsqueeze(0).to(self._device), use_cache=False)

    def _recorders(self) -> list[Recorder]:
        returns_tuple = self._anatomy.architecture.tuples
        return [Recorder(block, returns_tuple=returns_tuple) for block in self.blocks]
