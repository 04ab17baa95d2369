"""The walk through a model, block by block, on the outputs of the blocks that are already pruned.

All calibration windows go through every block twice, in the original model and in the pruned one. In front of an output
projection they stop: from what both models show there, the units that stay are chosen and the remaining weights are
fitted to the original's output, drift of earlier blocks included (see `fit`). Columns that go are zeros in the block
that the windows then go on through, which computes the same as the block without them; only what is saved is cut.

Only the original model's windows go through a block that is removed, so the next one is fitted to its absence. Windows
are computed one by one, whatever the number that is on the way together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from compress.errors import UsageError
from compress.journal import Resumed, SavePart
from compress.model.anatomy import Anatomy
from compress.model.blocks import BlockModel, run_block
from compress.model.checkpoint import Checkpoint
from compress.model.heap import trim_heap
from compress.model.kept import REMOVED
from compress.model.prunable import output_of
from compress.model.shapes import Shape
from compress.model.streams import Streams, first_streams
from compress.progress import Progress, Share
from compress.prune.block import BlockWork
from compress.prune.fit import masked
from compress.prune.gradients import Gradients
from compress.prune.outcome import Outcome, Walk, tasks_of
from compress.prune.settings import PruneSettings, held_out
from compress.prune.units import Evidence
from compress.records import LayerRecord


def prune_blocks(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    *,
    before: Shape,
    after: Shape,
    kept_layers: Sequence[int],
    settings: PruneSettings,
    windows: Sequence[torch.Tensor],
    gradients: Gradients | None,
    save: SavePart,
    progress: Progress,
    resumed: Resumed | None = None,
) -> list[LayerRecord]:
    """Prunes a model from `before` to `after`, after the blocks that are `resumed`.

    Every block of the source is one part, `save("block-00007", {}, records, replaced, state)`: `replaced` has the
    tensors of the pruned block that differ from the source's, by their names there, cut to what is kept. A block that
    is removed has one record.

    Args:
        kept_layers: blocks that stay.
        windows: calibration text, ids int64 [T] each; none where nothing needs any. See `check_tokens`.
        gradients: where the importance is `taylor`, or where `obs` is to weigh outputs by them.

    Raises:
        BrokenResultError: weights or statistics are not finite.
    """
    held = held_out(len(windows), settings.held_out)
    walk = Walk(checkpoint, anatomy, before, after, settings, gradients, frozenset(held))
    records = list(resumed.records) if resumed else []
    steps = _Steps(walk, set(kept_layers), windows, resumed)
    with torch.no_grad(), progress.phase("Pruning blocks", float(before.layers)) as advance:
        advance(steps.first)
        for index in range(steps.first, before.layers):
            share = Share(advance, 2 * len(windows) + 2)
            outcome = steps.block(index, share)
            state = steps.streams.state() if steps.streams is not None and index < steps.last else None
            save(f"block-{index:05d}", {}, outcome.records, outcome.tensors(), state)
            records += outcome.records
            del outcome
            trim_heap()
            share.finish()
    return records


def check_tokens(anatomy: Anatomy, before: Shape, after: Shape, windows: Sequence[torch.Tensor], share: float) -> None:
    """Raises UsageError: a fit would have more unknowns than tokens. `share` of the windows is held out."""
    held = set(held_out(len(windows), share))
    fitting = [ids for number, ids in enumerate(windows) if number not in held]
    tokens = sum(len(ids) for ids in fitting)
    attention = output_of(anatomy, 0, "heads")
    columns = {attention: attention.width // before.heads * after.heads}
    columns[output_of(anatomy, 0, "ffn")] = after.ffn
    layer, most = max(columns.items(), key=lambda pair: pair[1])
    if tokens < most:
        raise UsageError(
            f"the calibration text has {tokens} tokens to fit to, fewer than the {most} input columns that stay in "
            f"{layer.name} and in the same layer of every other block: their fit would follow the noise of the text. "
            f"{len(windows) - len(fitting)} of {len(windows)} windows are held out to check the fit.",
            hint=f"Give more or longer windows (--samples, --length), at least {16 * most} tokens for a good fit, or "
            "leave the fit out (--no-compensate) and choose by another importance than obs.",
        )


class _Steps:
    """The blocks, one after the other, and the windows on their way.

    Attributes:
        first: the block that is due.
        last: the last one that changes anything.
        streams: None without text.
    """

    def __init__(self, walk: Walk, kept: set[int], windows: Sequence[torch.Tensor], resumed: Resumed | None) -> None:
        self._walk, self._kept = walk, kept
        self.first, self.last = len(resumed.parts) if resumed else 0, max(kept)
        self.streams: Streams | None = None
        if windows:
            settings = walk.settings
            self._model = BlockModel(
                walk.checkpoint, walk.anatomy, dtype=settings.compute_dtype, device=settings.device
            )
            self.streams = first_streams(self._model.inputs, windows, two=True, spill=settings.spill)
            self._model.drop_outside()
            if resumed is not None:
                self.streams.restore(resumed.state)

    def block(self, index: int, share: Share) -> Outcome:
        """Does one block."""
        outcome = Outcome(self._walk, index)
        if index not in self._kept:
            outcome.records.append(LayerRecord(self._walk.anatomy.block_name(index), (), skipped=REMOVED))
            if self.streams is not None and index < self.last:
                self._pass_by(index, self.streams)
            return outcome
        walk = self._walk
        tasks = tasks_of(walk.anatomy, index, walk.before, walk.after, walk.settings)
        if self.streams is not None:
            with self._model.block(index) as block:
                work = BlockWork(outcome, block, copy.deepcopy(block), self.streams)
                work.run(tasks, share, goes_on=index < self.last)
            return outcome
        for task in tasks:
            one = outcome.projection(task.layer)
            found = masked(one, task.units, Evidence(None, None, None), walk.settings)
            outcome.take(task.layer, task.units, one, found, None)
        return outcome

    def _pass_by(self, index: int, streams: Streams) -> None:
        """The windows of the original model alone go through a block."""
        assert streams.original is not None
        device = self._walk.settings.device
        with self._model.block(index) as block:
            streams.original = streams.keep(
                run_block(block, states.to(device), streams.calls[window][index]).cpu().contiguous()
                for window, states in enumerate(streams.original)
            )
