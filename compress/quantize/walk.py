"""The walk through a model: block by block, on the outputs of the blocks that are already quantized.

For every block: its weights are read; all calibration windows pass through it and each group of layers with a
common input accumulates H = X^T X; the layers are quantized; their weights are replaced by what the codes stand
for; the windows pass once more, and the outputs are the inputs of the next block. So a layer is fitted to the
inputs that it will see in the quantized model.

Windows pass one by one. `batch_size` says how many are on the device together, never how they are computed, so it
cannot change a result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from compress.errors import BrokenResultError
from compress.model.anatomy import Anatomy, LinearLayer
from compress.model.blocks import BlockModel, Call, run_block
from compress.model.checkpoint import Checkpoint
from compress.progress import Progress
from compress.quantize.gptq import gptq
from compress.quantize.grid import max_abs_scale, output_error, quantize_nearest, search_scale
from compress.records import LayerRecord
from compress.scheme import QuantizedWeight, Scheme

SavePart = Callable[[str, Mapping[str, QuantizedWeight]], None]
# Without data large errors hurt more than their square says: 2.4 measures better than 2 on the sample models.
NEAREST_POWER = 2.4


@dataclass(frozen=True)
class LayerPlan:
    """What is to happen to one layer.

    Attributes:
        scale_dtype: dtype in which the format stores the scales.
    """

    layer: LinearLayer
    scheme: Scheme
    target: str
    algorithm: Literal["gptq", "rtn"]
    scale_dtype: torch.dtype


@dataclass(frozen=True)
class WalkSettings:
    damping: float
    batch_size: int
    compute_dtype: torch.dtype
    device: str


def quantize_nearest_all(
    checkpoint: Checkpoint, plans: Sequence[LayerPlan], save: SavePart, progress: Progress, device: str
) -> list[LayerRecord]:
    """Round-to-nearest of every planned layer, one weight in memory at a time; no calibration."""
    records = []
    with progress.phase("Rounding", len(plans)) as advance:
        for plan in plans:
            W = _weight(checkpoint, plan.layer).to(device)
            quantized = nearest(W, plan)
            save(plan.layer.name, {plan.layer.name: quantized})
            records.append(_record(plan, W, quantized, None, "rtn"))
            advance(1)
    return records


def nearest(W: torch.Tensor, plan: LayerPlan) -> QuantizedWeight:
    """Round to nearest, all columns alike: at 4 bits with scales searched for the least |error|^2.4.

    At 8 bits clipping the largest weights costs more than the finer grid gains (scripts/bench_quantization.json).
    """
    if plan.scheme.bits == 8:
        scale = max_abs_scale(W, plan.scheme, plan.scale_dtype)
    else:
        scale = search_scale(W, plan.scheme, plan.scale_dtype, power=NEAREST_POWER)
    return quantize_nearest(W, scale, plan.scheme)


def quantize_blocks(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    plans: Sequence[LayerPlan],
    windows: Sequence[torch.Tensor],
    settings: WalkSettings,
    save: SavePart,
    progress: Progress,
) -> list[LayerRecord]:
    """Quantizes the planned layers on calibration windows (ids, int64 [T])."""
    model = BlockModel(checkpoint, anatomy, dtype=settings.compute_dtype, device=settings.device)
    by_block: dict[int, list[LayerPlan]] = {}
    for plan in plans:
        by_block.setdefault(plan.layer.block, []).append(plan)
    last = max(by_block)
    hidden, calls = _first_inputs(model, windows)
    records: list[LayerRecord] = []
    with progress.phase("Quantizing blocks", float(last + 1)) as advance:
        for index in range(last + 1):
            share = _Share(advance, 2 * len(windows))
            step = _Step(anatomy, index, by_block.get(index, []), settings)
            with model.block(index) as block:
                records += _quantize_block(step, block, checkpoint, hidden, calls, save, share)
                if index < last:
                    _forward(block, hidden, calls, index, settings, share)
            share.finish()
    return records


@dataclass(frozen=True)
class _Step:
    anatomy: Anatomy
    index: int
    plans: list[LayerPlan]
    settings: WalkSettings

    def module(self, block: nn.Module, plan: LayerPlan) -> nn.Module:
        return block.get_submodule(plan.layer.name.removeprefix(self.anatomy.block_name(self.index) + "."))


class _Share:
    """Turns windows into shares of one block, so that the bar moves inside a long block."""

    def __init__(self, advance: Callable[[float], None], units: int) -> None:
        self._advance, self._unit, self._left = advance, 1.0 / units, 1.0

    def step(self) -> None:
        self._left -= self._unit
        self._advance(self._unit)

    def finish(self) -> None:
        self._advance(max(self._left, 0.0))
        self._left = 0.0


def _first_inputs(model: BlockModel, windows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[list[Call]]]:
    """Inputs of block 0 for every window and, for every window, how each block is called.

    Calls depend on the length alone, so windows of one length share them.
    """
    hidden: list[torch.Tensor] = []
    calls: list[list[Call]] = []
    by_length: dict[int, list[Call]] = {}
    for ids in windows:
        states, called = model.inputs(ids)
        hidden.append(states.cpu())
        calls.append(by_length.setdefault(len(ids), called))
    return hidden, calls


def _batches(hidden: Sequence[torch.Tensor], settings: WalkSettings) -> Iterator[tuple[int, torch.Tensor]]:
    """(index, window on the device), moved `batch_size` at a time."""
    for start in range(0, len(hidden), settings.batch_size):
        moved = [states.to(settings.device) for states in hidden[start : start + settings.batch_size]]
        yield from enumerate(moved, start)


def _forward(
    block: nn.Module,
    hidden: list[torch.Tensor],
    calls: Sequence[Sequence[Call]],
    index: int,
    settings: WalkSettings,
    share: _Share,
) -> None:
    """Replaces every window's hidden states by the block's outputs."""
    for window, states in _batches(hidden, settings):
        hidden[window] = run_block(block, states, calls[window][index]).cpu()
        share.step()


def _quantize_block(
    step: _Step,
    block: nn.Module,
    checkpoint: Checkpoint,
    hidden: list[torch.Tensor],
    calls: Sequence[Sequence[Call]],
    save: SavePart,
    share: _Share,
) -> list[LayerRecord]:
    if not step.plans:
        return []
    hessians = _hessians(step, block, hidden, calls, share)
    records, parts = [], {}
    for plan in step.plans:
        H, tokens = hessians[plan.layer.fused]
        W = _weight(checkpoint, plan.layer).to(step.settings.device)
        quantized, record = _quantize_layer(plan, W, H, tokens, step.settings)
        parts[plan.layer.name] = quantized
        records.append(record)
        _replace_weight(step.module(block, plan), quantized, plan.layer.transposed)
    save(f"block-{step.index:05d}", parts)
    return records


def _quantize_layer(
    plan: LayerPlan, W: torch.Tensor, H: torch.Tensor, tokens: int, settings: WalkSettings
) -> tuple[QuantizedWeight, LayerRecord]:
    if not bool(torch.isfinite(H).all()):
        raise BrokenResultError(
            f"{plan.layer.name}: the calibration statistics are not finite (width {plan.layer.width}, {tokens} "
            "tokens): the inputs of this layer overflow or are NaN. No later layer was looked at.",
            hint="Run the original model on this text and look at this layer's inputs; weights before it are broken "
            "or too large.",
        )
    if plan.algorithm == "rtn":
        quantized = nearest(W, plan)
        return quantized, _record(plan, W, quantized, H, "rtn", tokens=tokens)
    result = gptq(W, H, plan.scheme, scale_dtype=plan.scale_dtype, damping=settings.damping)
    notes = []
    if result.dead_columns:
        notes.append(f"{result.dead_columns} inputs were zero for every calibration token")
    if result.damping is None:
        notes.append("the Hessian could not be factored at any damping: rounded to nearest")
    elif result.damping != settings.damping:
        notes.append(f"damping raised from {settings.damping:g} to {result.damping:g}: the Hessian was singular")
    algorithm = "rtn" if result.damping is None else "gptq"
    record = _record(plan, W, result.weight, H, algorithm, tokens=tokens, damping=result.damping, notes=notes)
    return result.weight, record


def _hessians(
    step: _Step,
    block: nn.Module,
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Sequence[Call]],
    share: _Share,
) -> dict[str, tuple[torch.Tensor, int]]:
    """Mean of x x^T (float32 [in, in]) and token count per group of layers that share their input."""
    first = {plan.layer.fused: plan for plan in reversed(step.plans)}
    sums = {name: _Accumulator(plan.layer.width, step.settings.device) for name, plan in first.items()}
    with _listening((step.module(block, plan), sums[name]) for name, plan in first.items()):
        for window, states in _batches(hidden, step.settings):
            run_block(block, states, calls[window][step.index])
            share.step()
    return {name: (sums[name].total.div_(max(sums[name].tokens, 1)), sums[name].tokens) for name in sums}


class _Accumulator:
    """Sum of x x^T over tokens, in float32 whatever the model computes in."""

    def __init__(self, width: int, device: str) -> None:
        self.total = torch.zeros(width, width, device=device)
        self.tokens = 0

    def add(self, inputs: torch.Tensor) -> None:
        X = inputs.detach().reshape(-1, inputs.shape[-1]).float()  # [tokens, in]
        self.total.addmm_(X.T, X)
        self.tokens += X.shape[0]


@contextmanager
def _listening(pairs: Iterable[tuple[nn.Module, _Accumulator]]) -> Iterator[None]:
    def hook(accumulator: _Accumulator) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _module, args: accumulator.add(args[0])

    handles = [module.register_forward_pre_hook(hook(accumulator)) for module, accumulator in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _weight(checkpoint: Checkpoint, layer: LinearLayer) -> torch.Tensor:
    """float32 [out, in], whatever the file's dtype and orientation."""
    stored = checkpoint.read(layer.tensor).float()
    return stored.T.contiguous() if layer.transposed else stored


def _replace_weight(module: nn.Module, quantized: QuantizedWeight, transposed: bool) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    dense = quantized.dequantize(torch.float32)
    with torch.no_grad():
        weight.copy_(dense.T if transposed else dense)


def _record(
    plan: LayerPlan,
    W: torch.Tensor,
    quantized: QuantizedWeight,
    H: torch.Tensor | None,
    algorithm: str,
    *,
    tokens: int | None = None,
    damping: float | None = None,
    notes: Sequence[str] = (),
) -> LayerRecord:
    plain = quantize_nearest(W, max_abs_scale(W, plan.scheme, plan.scale_dtype), plan.scheme)
    dense = quantized.dequantize(torch.float32)
    zero_groups = int((W.reshape(W.shape[0], quantized.scale.shape[1], -1) == 0).all(dim=-1).sum())
    remarks = [*notes, f"{zero_groups} groups are all zero and stay exactly zero"] if zero_groups else list(notes)
    return LayerRecord(
        name=plan.layer.name,
        shape=(plan.layer.out, plan.layer.width),
        target=plan.target,
        algorithm=algorithm,
        group_size=plan.scheme.group_size,
        scheme=plan.scheme.label,
        damping=damping,
        rank_bound=None if tokens is None else min(tokens, plan.layer.width),
        tokens=tokens,
        error_before=output_error(W, plain.dequantize(torch.float32), H),
        error_after=output_error(W, dense, H),
        notes=tuple(remarks),
        sha256=hashlib.sha256(dense.cpu().contiguous().numpy().tobytes()).hexdigest(),
    )
