"""One transformer block at a time: a model whose weights are read when a block is due and dropped after it.

The skeleton of the stock class is built with its parameters on the meta device. Everything outside the blocks
(embeddings, norms) is loaded at once, and can be dropped while blocks are at work; a block's weights are read from the
shards by name when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.errors import UsageError
from compress.model.anatomy import Anatomy
from compress.model.checkpoint import Checkpoint
from compress.model.experts import linearise
from compress.model.load import config_of, empty_model, model_class

if TYPE_CHECKING:
    from collections.abc import Iterator


_LEGACY = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
"""Today's names and those in files of the first BERT models; stock loading renames them too."""


@dataclass(frozen=True)
class Call:
    """Everything a block is called with beside its hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder(nn.Module):
    """Stands in for a block: notes how it is called and hands its input on unchanged.

    What a block is called with (masks, rotary embeddings) depends on the input's length and the block's index
    but never on hidden states, so one pass through recorders shows how every block will be called. What a model
    reads off its blocks (ModernBERT: the kind of attention) is the block's own.
    """

    def __init__(self, block: nn.Module, *, returns_tuple: bool) -> None:
        super().__init__()
        self._replaced = (block,)  # in a tuple it is no submodule
        self._returns_tuple = returns_tuple
        self.call: Call | None = None
        self.hidden: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_replaced"][0], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor]:
        self.hidden = hidden
        self.call = Call(args, kwargs)
        return (hidden,) if self._returns_tuple else hidden


class BlockModel:
    """The blocks of a checkpoint, one in memory at a time.

    Args:
        dtype: dtype of the computation; weights are cast to it when they are read.
        read: gives other weights than the checkpoint's own, by the names of its tensors.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        anatomy: Anatomy,
        *,
        dtype: torch.dtype,
        device: str,
        read: Callable[[str], torch.Tensor] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._read = read or checkpoint.read
        self._anatomy = anatomy
        self._dtype = dtype
        self._device = device
        self._base = _skeleton(checkpoint, anatomy)
        self._blocks = _block_list(self._base, anatomy)
        self._linearise_experts()
        self._load_outside_blocks()

    def __len__(self) -> int:
        return len(self._blocks)

    def _linearise_experts(self) -> None:
        """Calibration stops at linear layers, which the stock class of experts has none of."""
        experts = self._anatomy.architecture.experts
        for index, block in enumerate(self._blocks):
            if experts is not None and experts.count(self._checkpoint.config, index):
                linearise(block, experts)

    def _load_outside_blocks(self) -> None:
        prefix = self._anatomy.architecture.blocks + "."
        names = [name for name, _ in self._base.named_parameters() if not name.startswith(prefix)]
        persistent = [name for name in self._base.state_dict() if not name.startswith(prefix)]
        state = {name: self._tensor(name) for name in dict.fromkeys(names + persistent) if self._has(name)}
        self._base.load_state_dict(state, strict=False, assign=True)
        unread = [name for name in names if name not in state]
        if unread and any(not name.startswith("pooler") for name in unread):
            raise UsageError(f"{self._checkpoint.source}: the weights lack {', '.join(unread)}.")
        self._outside = state
        if unread:
            self._base.register_module("pooler", None)  # its output is used by nothing here
        blocks = {id(module) for module in self._blocks.modules()}
        for module in self._base.modules():
            if id(module) not in blocks:
                for name, buffer in list(module.named_buffers(recurse=False)):
                    setattr(module, name, buffer.to(self._device))

    def drop_outside(self) -> None:
        """Gives the memory of everything outside the blocks back; what needs it later reads it again."""
        _unload(self._base, self._outside)
        self._outside = {}

    def _stored(self, inner: str) -> str:
        """Name in the file of a tensor of the base model."""
        experts, blocks = self._anatomy.architecture.experts, f"{self._anatomy.architecture.blocks}."
        if experts is not None and inner.startswith(blocks):
            index, _, inside = inner.removeprefix(blocks).partition(".")
            inner = f"{blocks}{index}.{experts.stored(inside)}"
        name = self._anatomy.file_prefix + inner
        legacy = (name.removesuffix(new) + old for new, old in _LEGACY if name.endswith(new))
        return name if name in self._checkpoint.tensors else next(legacy, name)

    def _has(self, inner: str) -> bool:
        return self._stored(inner) in self._checkpoint.tensors

    def _tensor(self, inner: str) -> torch.Tensor:
        tensor = self._read(self._stored(inner))
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)

    @torch.no_grad()
    def inputs(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
        """Hidden states [1, T, d] that enter block 0 for ids [T], and the call of every block."""
        if not self._outside:
            self._load_outside_blocks()
        returns_tuple = self._anatomy.architecture.tuples
        recorders = [Recorder(block, returns_tuple=returns_tuple) for block in self._blocks]
        with replaced(self._blocks, recorders):
            self._base(input_ids=ids.unsqueeze(0).to(self._device), use_cache=False)
        hidden = recorders[0].hidden
        calls = [recorder.call for recorder in recorders if recorder.call is not None]
        if hidden is None or len(calls) != len(recorders):
            raise RuntimeError(f"{self._anatomy.model_type}: the forward pass did not visit every block")
        return hidden, calls

    @torch.no_grad()
    def last_hidden_state(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the base model gives for ids [T], [1, T, d], if `hidden` [1, T, d] is its last block's output."""
        if not self._outside:
            self._load_outside_blocks()
        returns_tuple = self._anatomy.architecture.tuples
        recorders = [Recorder(block, returns_tuple=returns_tuple) for block in self._blocks]
        recorders[-1].register_forward_hook(lambda *_call: (hidden,) if returns_tuple else hidden)
        with replaced(self._blocks, recorders):
            output = self._base(input_ids=ids.unsqueeze(0).to(self._device), use_cache=False)
        result: torch.Tensor = output.last_hidden_state
        return result

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """Block `index` with its weights read; they are dropped at the end."""
        block = self._blocks[index]
        stem = f"{self._anatomy.architecture.blocks}.{index}."
        state = {name: self._tensor(stem + name) for name in block.state_dict() if self._has(stem + name)}
        missing = [name for name, _ in block.named_parameters() if name not in state]
        if missing:
            raise UsageError(f"{self._checkpoint.source}: block {index} lacks {', '.join(missing)}.")
        block.load_state_dict(state, strict=False, assign=True)
        for module in block.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self._device))
        try:
            yield block
        finally:
            _unload(block, state)


def _unload(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Puts tensors without values in the place of those that `state` names."""
    empty = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    module.load_state_dict(empty, strict=False, assign=True)


@torch.no_grad()
def run_block(block: nn.Module, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """Output [1, T, d] of a block."""
    output = block(hidden, *call.args, **call.kwargs)
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _skeleton(checkpoint: Checkpoint, anatomy: Anatomy) -> nn.Module:
    """The base model (no head) with parameters on the meta device and buffers real."""
    cls = model_class(checkpoint.config)
    model = empty_model(cls, config_of(cls, checkpoint.folder), checkpoint.folder)
    base: nn.Module = getattr(model, anatomy.architecture.base) if anatomy.module_prefix else model
    return base


def _block_list(base: nn.Module, anatomy: Anatomy) -> nn.ModuleList:
    blocks = base.get_submodule(anatomy.architecture.blocks)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != anatomy.depth:
        raise UsageError(
            f"{anatomy.model_type}: {anatomy.architecture.blocks} is not a list of {anatomy.depth} blocks."
        )
    return blocks


@contextmanager
def replaced(blocks: nn.ModuleList, others: Sequence[nn.Module]) -> Iterator[None]:
    """Other modules in the places of some blocks, in order, for a while."""
    originals = list(blocks)
    for index, other in enumerate(others):
        blocks[index] = other
    try:
        yield
    finally:
        for index, original in enumerate(originals):
            blocks[index] = original
