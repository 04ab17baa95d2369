"""One block at work: its windows walk through it, its layers are quantized on the way, and it may learn afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.model.anatomy import Anatomy
from compress.model.blocks import BlockModel, Call, run_block
from compress.model.checkpoint import Checkpoint
from compress.model.folding import Producer
from compress.model.heap import trim_heap
from compress.model.moe import is_expert_group
from compress.model.passes import PausedPass, Reached, Stop, paused
from compress.model.streams import Streams
from compress.progress import Share
from compress.quantize.folds import changes, smoothing_record, standing
from compress.quantize.gptq import GptqResult, GptqSettings, aim, prepare
from compress.quantize.layer import (
    Facts,
    LayerPlan,
    check_finite_statistics,
    layer_record,
    nearest,
    quantize_layer,
    read_weight,
    weight_sha256,
)
from compress.quantize.refine import RefineSettings, held_out, refine
from compress.quantize.smooth import sampled, smooth_group
from compress.quantize.statistics import Accumulator
from compress.records import LayerRecord
from compress.scheme import QuantizedWeight

SAMPLED_ROWS = 1024  # tokens of all windows together on which factors are chosen
ROWS_PER_WINDOW = 8  # at least; of very many windows only some are sampled


@dataclass(frozen=True)
class WalkSettings:
    """Attributes:
    batch_size: windows on the way together where not all are.
    one_pass: all windows stop together; without it a few at a time come anew to every group of layers.
    spill: folder in which the windows wait in front of a block, where memory does not hold them; None for memory.
    fold_biases: factors may also go into norms and layers with a bias, which is then stored in other numbers.
    """

    gptq: GptqSettings
    batch_size: int
    compute_dtype: torch.dtype
    device: str
    one_pass: bool = True
    spill: Path | None = None
    fold_biases: bool = False
    refine: RefineSettings = field(default_factory=RefineSettings)

    @property
    def two_streams(self) -> bool:
        """Whether the windows also go through the original weights."""
        return self.gptq.asymmetric or self.refine.steps > 0


@contextmanager
def opened_block(
    model: BlockModel,
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    producers: Mapping[str, Producer],
    index: int,
    plans: Sequence[LayerPlan],
    settings: WalkSettings,
    streams: Streams,
) -> Iterator[BlockWork]:
    """Block `index` with its weights read; they are dropped at the end."""
    with model.block(index) as block:
        original = copy.deepcopy(block) if streams.original is not None else None
        calls = [calls[index] for calls in streams.calls]
        name = anatomy.block_name(index)
        yield BlockWork(block, original, name, anatomy, producers, checkpoint, list(plans), settings, streams, calls)


@dataclass(frozen=True)
class _Done:
    """A layer that is quantized, with what its record and the learning need."""

    plan: LayerPlan
    W: torch.Tensor
    result: GptqResult
    facts: Facts
    noted: Mapping[str, Any] | None


class _Seen:
    """What the windows show of the inputs of one group."""

    def __init__(self, width: int, device: str) -> None:
        self.accumulator = Accumulator(width, device)
        self.sample: list[torch.Tensor] = []  # [rows, in] for each window, where factors are to be chosen


@dataclass
class BlockWork:
    """One block.

    Attributes:
        block, original: its modules in the quantized and in the original model.
        producers: by group, what may take factors over.
        weights, records: of the layers that are done, by name.
        replaced: tensors of the checkpoint that took factors over, by their name in the file.
    """

    block: nn.Module
    original: nn.Module | None
    name: str
    anatomy: Anatomy
    producers: Mapping[str, Producer]
    checkpoint: Checkpoint
    plans: list[LayerPlan]
    settings: WalkSettings
    streams: Streams
    calls: list[Call]
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    records: dict[str, LayerRecord] = field(default_factory=dict)
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    _done: list[_Done] = field(default_factory=list)

    def run(self, share: Share) -> None:
        """Quantizes the block's layers and replaces the streams' hidden states by the block's outputs."""
        learning = self.settings.refine.steps > 0 and bool(self.plans)
        if self.settings.one_pass:
            with self._passes(self._everything, self._groups) as (quantized, original):
                for _ in self._groups:
                    self._quantize(*self._next(quantized, original, share))
                self._through(quantized if not learning else None, original, share)
        else:
            for group in self._groups:
                self._quantize(group, self._collected(group, share))
            self._go_on(share, quantized=not learning)
        if learning:
            self._learn()
            self._go_on(share, original=False)

    @property
    def _everything(self) -> range:
        return range(len(self.calls))

    @property
    def _groups(self) -> list[str]:
        return list(dict.fromkeys(plan.layer.fused for plan in self.plans))

    @property
    def _fitted(self) -> int:
        """Windows that the layers are fitted to; those after them decide whether what was learnt is kept."""
        count = len(self.calls)
        return count - held_out(count) if self.settings.refine.steps else count

    def _next(self, quantized: PausedPass, original: PausedPass | None, share: Share) -> tuple[str, _Seen]:
        """The group in front of which all windows stop next."""
        seen: dict[str, _Seen] = {}
        self._add(seen, self._everything, quantized, original, share)
        ((group, one),) = seen.items()
        return group, one

    def _add(
        self, seen: dict[str, _Seen], which: range, quantized: PausedPass, original: PausedPass | None, share: Share
    ) -> None:
        """Adds what the windows of a pass see at their next stop."""
        others: Iterator[Reached | None] = repeat(None) if original is None else original.advance()
        pairs = zip(quantized.advance(), others, strict=original is not None)
        for window, (here, there) in zip(which, pairs, strict=False):
            share.step()
            if window < self._fitted:
                if here.group not in seen:
                    seen[here.group] = _Seen(here.inputs.shape[-1], self.settings.device)
                self._see(seen[here.group], window, here, there)

    def _see(self, seen: _Seen, window: int, here: Reached, there: Reached | None) -> None:
        """Adds one window. Layers that are only rounded need no more than a sample of their inputs."""
        plans = self._of(here.group)
        rows = max(ROWS_PER_WINDOW, SAMPLED_ROWS // self._fitted)
        every = -(-self._fitted * rows // SAMPLED_ROWS)
        rounded = all(plan.algorithm == "rtn" for plan in plans)
        if window % every == 0 and (rounded or all(plan.smooth for plan in plans)):
            sample = sampled(here.inputs, rows, window // every)
            if all(plan.smooth for plan in plans):
                seen.sample.append(sample)
            if rounded:
                seen.accumulator.add(sample)
        if rounded:
            return
        if there is None or not self.settings.gptq.asymmetric or is_expert_group(here.group):
            # an expert does not see the same tokens in the two models, so there is no drift between them
            seen.accumulator.add(here.inputs)
        else:
            drift = None
            if here.residual is not None and there.residual is not None:
                drift = there.residual - here.residual
            seen.accumulator.add(here.inputs, there.inputs, drift)

    def _collected(self, group: str, share: Share) -> _Seen:
        """What one group sees, the windows `batch_size` at a time from the block's beginning to the group.

        Earlier groups are quantized already, so it is what the group would see if all windows stopped together.
        """
        seen: dict[str, _Seen] = {}
        for start in range(0, self._fitted, self.settings.batch_size):
            which = range(start, min(start + self.settings.batch_size, self._fitted))
            with self._passes(which, [group]) as (quantized, original):
                self._add(seen, which, quantized, original, share)
        return seen[group]

    @contextmanager
    def _passes(self, which: range, groups: Sequence[str] = ()) -> Iterator[tuple[PausedPass, PausedPass | None]]:
        """The passes of some windows through the block, and of the second stream through the original one.

        Args:
            groups: in front of which they stop.
        """
        with ExitStack() as stack:
            both: list[PausedPass | None] = []
            for block, hidden in ((self.block, self.streams.changed), (self.original, self.streams.original)):
                if block is None or hidden is None:
                    both.append(None)
                    continue
                states = [hidden[window].to(self.settings.device) for window in which]
                calls = [self.calls[window] for window in which]
                both.append(stack.enter_context(paused(block, states, calls, self._stops(block, groups))))
            assert both[0] is not None
            yield both[0], both[1]

    def _stops(self, block: nn.Module, groups: Sequence[str]) -> dict[str, Stop]:
        found: dict[str, Stop] = {}
        residuals = dict(self.anatomy.architecture.residuals)
        for plan in self.plans:
            group = plan.layer.fused
            if group not in groups:
                continue
            path = residuals.get(group.rpartition(":")[2]) if self.settings.gptq.asymmetric else None
            residual = None if path is None else block.get_submodule(path)
            found.setdefault(group, Stop(block.get_submodule(self._path(plan)), residual))
        return found

    def _path(self, plan: LayerPlan) -> str:
        inside, experts = plan.layer.name.removeprefix(self.name + "."), self.anatomy.architecture.experts
        return inside if experts is None else experts.in_class(inside)

    def _quantize(self, group: str, seen: _Seen) -> None:
        plans = self._of(group)
        trim_heap()
        statistics = seen.accumulator.mean()
        check_finite_statistics(plans[0].layer.name, statistics)
        weights = [read_weight(self.checkpoint, plan.layer).to(self.settings.device) for plan in plans]
        smoothing, noted = self._smoothed(group, plans, weights, seen) if seen.sample else (None, None)
        prepared, H, tokens = None, statistics.H, statistics.tokens
        if tokens and any(plan.algorithm == "gptq" for plan in plans):
            prepared = prepare(statistics if smoothing is None else statistics.scaled(smoothing), self.settings.gptq)
        del statistics  # of a wide layer each of these matrices takes hundreds of megabytes
        facts = Facts(H if tokens else None, tokens, 0 if prepared is None else prepared.dead, smoothing)
        stored = weights if smoothing is None else [W * smoothing for W in weights]
        targets: list[torch.Tensor | None] = [None] * len(plans)
        if prepared is not None:
            targets = [aim(W, prepared, plan.scheme) for plan, W in zip(plans, stored, strict=True)]
            prepared = prepared.aimed()
        for plan, W, one, target in zip(plans, weights, stored, targets, strict=True):
            result = quantize_layer(plan, one, prepared, self.settings.gptq, target)
            self._keep(_Done(plan, W, result, facts, noted))

    def _of(self, group: str) -> list[LayerPlan]:
        return [plan for plan in self.plans if plan.layer.fused == group]

    def _smoothed(
        self, group: str, plans: list[LayerPlan], weights: list[torch.Tensor], seen: _Seen
    ) -> tuple[torch.Tensor | None, Mapping[str, Any] | None]:
        """Factors [in] of a group and what its records say of them; what took them over is changed in here."""
        producer = self.producers.get(group)
        if producer is None or (producer.bias is not None and not self.settings.fold_biases):
            return None, None
        layers = {layer.name: layer for layer in self.anatomy.layers}
        before = standing(producer, self.checkpoint, layers, self.weights, self.replaced, self.settings.device)
        smoothing = smooth_group(
            torch.cat(seen.sample),
            weights,
            before.fold,
            lambda W: nearest(W, plans[0]).dequantize(torch.float32),
            channels=before.channels.to(self.settings.device),
            activation_bits=plans[0].scheme.activation_bits,
        )
        if smoothing.folded is None:
            return None, None
        changed = changes(before, smoothing.folded)
        self.replaced |= changed.replaced
        self.weights |= changed.weights
        for name, weight in changed.weights.items():
            self.records[name] = replace(self.records[name], sha256=weight_sha256(weight))
        return smoothing.s, smoothing_record(producer, smoothing)

    def _keep(self, done: _Done, note: str | None = None) -> None:
        """Takes a layer's weight as it is now; with learning ahead, what that needs is kept too."""
        name, weight = done.plan.layer.name, done.result.weight
        new = layer_record(done.plan, done.W, done.result, done.facts, self.settings.gptq, note)
        self.records[name] = replace(new, smoothing=done.noted)
        self.weights[name] = weight
        dense = done.facts.unsmoothed(weight.dequantize(torch.float32))
        _replace_weight(self.block.get_submodule(self._path(done.plan)), dense, done.plan.layer.transposed)
        learns = done.facts.tokens and done.plan.scheme.values == "int"
        if self.settings.refine.steps and note is None and learns:
            self._done.append(done)

    def _learn(self) -> None:
        assert self.streams.original is not None
        results = {self._path(done.plan): (done.result, done.plan.layer.transposed) for done in self._done}
        inputs, targets = (
            [states.to(self.settings.device) for states in stream]
            for stream in (self.streams.changed, self.streams.original)
        )
        learnt = refine(self.block, results, inputs, self.calls, targets, self.settings.refine)
        change = f"the block's relative error on held-out windows {learnt.error_before:.4g} -> {learnt.error_after:.4g}"
        verb = "refined" if learnt.weights is not None else "refinement dropped"
        for done in self._done:
            result = done.result
            if learnt.weights is not None:
                result = replace(result, weight=learnt.weights[self._path(done.plan)])
            self._keep(replace(done, result=result), f"{verb}: {change}")

    def _go_on(self, share: Share, *, quantized: bool = True, original: bool = True) -> None:
        """Lets the windows of one or both streams through the block, one after the other."""
        if quantized:
            self.streams.changed = self.streams.keep(self._outputs(self.block, self.streams.changed))
            share.step()
        if original and self.original is not None and self.streams.original is not None:
            self.streams.original = self.streams.keep(self._outputs(self.original, self.streams.original))
            share.step()

    def _outputs(self, block: nn.Module, hidden: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for states, call in zip(hidden, self.calls, strict=True):
            yield run_block(block, states.to(self.settings.device), call).cpu().contiguous()

    def _through(self, quantized: PausedPass | None, original: PausedPass | None, share: Share) -> None:
        """Lets passes run to their end and takes their outputs."""
        for running in (quantized, original):
            if running is not None:
                for _ in running.advance():
                    raise RuntimeError(f"{self.name}: a pass stops where no layer is to be quantized any more")
                outputs = self.streams.keep(states.cpu().contiguous() for states in running.outputs)
                share.step()
                if running is quantized:
                    self.streams.changed = outputs
                else:
                    self.streams.original = outputs


def _replace_weight(module: nn.Module, dense: torch.Tensor, transposed: bool) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    weight.copy_(dense.T if transposed else dense)
