"""One block at work: its windows walk through it in both models, and its projections are pruned on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from compress.errors import BrokenResultError
from compress.model.anatomy import LinearLayer
from compress.model.blocks import Call, run_block
from compress.model.passes import PausedPass, Reached, Stop, paused
from compress.model.streams import Streams
from compress.progress import Share
from compress.prune.fit import fitted
from compress.prune.outcome import Outcome, Task, Walk
from compress.prune.statistics import POST_NORM, Accumulator, Statistics, token_weights
from compress.prune.units import Evidence, Units


class _Seen:
    """What the windows show of one task: those that are fitted to, in two halves, and the others."""

    def __init__(self, W: torch.Tensor, *, residual: bool) -> None:
        self.halves = (Accumulator(W, residual=residual), Accumulator(W, residual=residual))
        self.held = Accumulator(W, residual=residual)


@dataclass
class BlockWork:
    """One block that stays.

    Attributes:
        pruned, original: its modules in the two models.
    """

    outcome: Outcome
    pruned: nn.Module
    original: nn.Module
    streams: Streams

    def run(self, tasks: Sequence[Task], share: Share, *, goes_on: bool) -> None:
        """Does the tasks, and puts the block's outputs in the places of the streams' hidden states.

        Args:
            goes_on: whether anything comes after this block.
        """
        if self.walk.settings.one_pass:
            with self._passes(self._everything, tasks) as passes:
                for _ in tasks:
                    seen: dict[str, _Seen] = {}
                    self._add(seen, tasks, self._everything, passes, share)
                    ((group, one),) = seen.items()
                    self._do(next(task for task in tasks if task.group == group), one)
                if goes_on:
                    self._leave(passes, share)
            return
        for task in tasks:
            self._do(task, self._collected(task, share))
        if goes_on:
            self.streams.changed = self.streams.keep(self._outputs(self.pruned, self.streams.changed))
            self.streams.original = self.streams.keep(self._outputs(self.original, self.streams.original or ()))

    @property
    def index(self) -> int:
        return self.outcome.index

    @property
    def walk(self) -> Walk:
        return self.outcome.walk

    @property
    def _everything(self) -> range:
        return range(len(self.streams.calls))

    @contextmanager
    def _passes(self, which: range, tasks: Sequence[Task]) -> Iterator[tuple[PausedPass, PausedPass]]:
        """The passes of some windows through the block in both models."""
        assert self.streams.original is not None
        device = self.walk.settings.device
        with ExitStack() as stack:
            both = []
            for block, hidden in ((self.pruned, self.streams.changed), (self.original, self.streams.original)):
                states = [hidden[window].to(device) for window in which]
                stops = {task.group: self._stop(block, task) for task in tasks}
                both.append(stack.enter_context(paused(block, states, [self._call(window) for window in which], stops)))
            yield both[0], both[1]

    def _stop(self, block: nn.Module, task: Task) -> Stop:
        residuals = dict(self.walk.anatomy.architecture.residuals)
        path = residuals.get(task.group.rpartition(":")[2])
        module = block.get_submodule(self._path(task.layer))
        return Stop(module, None if path is None else block.get_submodule(path))

    def _call(self, window: int) -> Call:
        return self.streams.calls[window][self.index]

    def _path(self, layer: LinearLayer) -> str:
        return layer.name.removeprefix(f"{self.walk.anatomy.block_name(self.index)}.")

    def _collected(self, task: Task, share: Share) -> _Seen:
        """What one task sees, some windows at a time from the block's beginning: the same as if all stopped there."""
        seen: dict[str, _Seen] = {}
        step = self.walk.settings.batch_size
        for start in range(0, len(self._everything), step):
            which = self._everything[start : start + step]
            with self._passes(which, [task]) as passes:
                self._add(seen, [task], which, passes, share)
        return seen[task.group]

    def _add(
        self,
        seen: dict[str, _Seen],
        tasks: Sequence[Task],
        which: range,
        passes: tuple[PausedPass, PausedPass],
        share: Share,
    ) -> None:
        """Adds what the windows of the passes see at their next stop."""
        by_group = {task.group: task for task in tasks}
        for window, here, there in zip(which, passes[0].advance(), passes[1].advance(), strict=False):
            share.step()
            task = by_group[here.group]
            if here.group not in seen:
                W = self._weight(task)
                seen[here.group] = _Seen(W, residual=here.residual is not None)
            one = seen[here.group]
            sums = one.held if window in self.walk.held else one.halves[self.walk.half(window)]
            self._see(sums, here, there)

    def _weight(self, task: Task) -> torch.Tensor:
        """W of a projection, float32."""
        return self.outcome.read(task.layer).float()

    def _see(self, sums: Accumulator, here: Reached, there: Reached) -> None:
        x, original = (_tokens(one.inputs) for one in (here, there))
        drift = None
        if here.residual is not None and there.residual is not None:
            drift = _tokens(there.residual) - _tokens(here.residual)
        weights = None
        if self.walk.anatomy.model_type in POST_NORM:
            weights = token_weights(original @ sums.W.T)
        sums.add(x, original, drift, weights)

    def _do(self, task: Task, seen: _Seen) -> None:
        first, second, held = (sums.mean() for sums in (*seen.halves, seen.held))
        if not first.tokens + second.tokens:
            first = held  # there is one window only
        for one in (first, second, held):
            _check_finite(task.layer.name, one)
        self._prune(task.layer, task.units, (first, second), held)

    def _prune(self, layer: LinearLayer, units: Units, halves: tuple[Statistics, Statistics], held: Statistics) -> None:
        gradients, one = self.walk.gradients, self.outcome.projection(layer)
        fisher = None if gradients is None else gradients.fisher.get(layer.name)
        taylor = None if gradients is None else gradients.taylor.get(layer.name)
        found = fitted(one, units, halves, held, Evidence(None, fisher, taylor), self.walk.settings)
        self.outcome.take(layer, units, one, found, halves[0].tokens + halves[1].tokens)
        module = self.pruned.get_submodule(self._path(layer))
        _put(module, "weight", found.W.T if layer.transposed else found.W)
        if found.bias is not None:
            _put(module, "bias", found.bias)

    def _outputs(self, block: nn.Module, hidden: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for window, states in enumerate(hidden):
            yield run_block(block, states.to(self.walk.settings.device), self._call(window)).cpu().contiguous()

    def _leave(self, passes: tuple[PausedPass, PausedPass], share: Share) -> None:
        """Lets both passes run to their end and takes their outputs."""
        outputs = []
        for running in passes:
            for _ in running.advance():
                raise RuntimeError(f"block {self.index}: a pass stops where nothing is to be done any more")
            outputs.append(self.streams.keep(states.cpu().contiguous() for states in running.outputs))
            share.step()
        self.streams.changed, self.streams.original = outputs


def _tokens(states: torch.Tensor) -> torch.Tensor:
    """[T, width] float32. The first token counts: what all others look at when they look for nothing must stay, too."""
    return states.reshape(-1, states.shape[-1]).float()


def _put(module: nn.Module, name: str, values: torch.Tensor) -> None:
    parameter = getattr(module, name)
    assert isinstance(parameter, torch.Tensor)
    parameter.copy_(values)


def _check_finite(name: str, statistics: Statistics) -> None:
    if not statistics.finite:
        raise BrokenResultError(
            f"{name}: the calibration statistics are not finite (width {len(statistics.C)}, {statistics.tokens} "
            "tokens): the inputs of this layer overflow or are NaN. No later layer was looked at.",
            hint="Run the original model on this text and look at this layer's inputs; weights before it are broken "
            "or too large.",
        )
