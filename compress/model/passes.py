"""All calibration windows inside one block at once, stopped at the same linear layer.

The usual way runs a block twice: once to collect what its layers see, once more, changed, to get the next block's
inputs. Here every window's forward pass stops where it is about to enter a group of linear layers with a common
input. When all windows stand there, the group can be changed by what its inputs are, and all go on through its new
weights: one forward pass for each window, and later groups of the block see what the changed ones give.

Each window's pass is a greenlet, a function call with a stack of its own that is left and entered again by an
explicit switch. Nothing runs in parallel, so the order of all operations is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from greenlet import greenlet
from torch import nn

from compress.model.blocks import Call, run_block


@dataclass(frozen=True)
class Stop:
    """Where all windows are to stand.

    Attributes:
        module: the first layer of the group that is called.
        residual: what the group's output is added to: the input of this module, the block's own input where it is
            the block itself, or None where the output is added to nothing.
    """

    module: nn.Module
    residual: nn.Module | None = None


@dataclass(frozen=True)
class Reached:
    """One window at a stop.

    Attributes:
        inputs: [..., T, in], what the group's layers get.
        residual: [..., T, out], see `Stop`; None where the block has not computed it before.
    """

    group: str
    inputs: torch.Tensor
    residual: torch.Tensor | None


@dataclass
class _Window:
    """One window's pass.

    Attributes:
        arguments: what `run_block` is called with.
        residuals: inputs of the watched modules that it went by, by the module's id.
    """

    run: greenlet
    arguments: tuple[nn.Module, torch.Tensor, Call]
    residuals: dict[int, torch.Tensor] = field(default_factory=dict)


class PausedPass:
    """The forward passes of all windows through one block; to be used under `torch.no_grad()`.

    Args:
        block: the block; its weights may be changed while the passes are stopped.
        hidden: inputs of the block, [1, T, d] for each window.
        calls: how the block is called for each window.
        stops: by group; modules that are never called are no stop.
    """

    def __init__(
        self, block: nn.Module, hidden: Sequence[torch.Tensor], calls: Sequence[Call], stops: Mapping[str, Stop]
    ) -> None:
        self._windows = [
            _Window(greenlet(run_block), (block, states, call)) for states, call in zip(hidden, calls, strict=True)
        ]
        self._running: _Window | None = None
        watched = {id(stop.residual): stop.residual for stop in stops.values() if stop.residual is not None}
        self._handles = [module.register_forward_pre_hook(self._watch) for module in watched.values()]
        self._handles += [
            stop.module.register_forward_pre_hook(self._stop(group, stop)) for group, stop in stops.items()
        ]
        self.outputs: list[torch.Tensor] = []

    def advance(self) -> Iterator[Reached]:
        """Lets every window run to its next stop, one after the other, and yields it there.

        Yields nothing when the passes are over; `outputs` then holds the block's outputs [1, T, d].
        """
        for window in self._windows:
            if window.run.dead:
                continue
            self._running = window
            reached = window.run.switch() if window.run else window.run.switch(*window.arguments)
            if window.run.dead:
                self.outputs.append(reached)
            else:
                yield reached

    def close(self) -> None:
        """Unwinds passes that were left in the middle and takes the stops away."""
        for window in self._windows:
            if window.run and not window.run.dead:
                window.run.throw()
        for handle in self._handles:
            handle.remove()

    def _watch(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert self._running is not None
        self._running.residuals[id(module)] = args[0]

    def _stop(self, group: str, stop: Stop) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            window = self._running
            assert window is not None
            residual = None if stop.residual is None else window.residuals.get(id(stop.residual))
            window.run.parent.switch(Reached(group, args[0], residual))

        return hook


@contextmanager
def paused(
    block: nn.Module, hidden: Sequence[torch.Tensor], calls: Sequence[Call], stops: Mapping[str, Stop]
) -> Iterator[PausedPass]:
    """A PausedPass that is closed at the end."""
    running = PausedPass(block, hidden, calls, stops)
    try:
        yield running
    finally:
        running.close()
