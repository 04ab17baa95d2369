"""Block-wise learning after GPTQ: the block as a whole, non-linear parts included, is fitted to the original's output.

GPTQ fits every layer for itself. Here the roundings and scales of all layers of a block are moved together so that

    L = sum over tokens |B_q(x) - B(x~)|^2 / sum over tokens |B(x~)|^2

falls, with x the block's inputs in the quantized model, x~ those in the original one, B the original block.

Every code is q = clamp(round(l + v)): l is the value that GPTQ rounded, in units of the scale, and v, zero at first,
is learnt; clips follow from the scales, which are learnt too. Gradients pass through the rounding as if it were not
there, and only their sign is used, with a step that falls linearly to zero (SignRound, Cheng et al., arXiv
2309.05516, which starts from round-to-nearest; here GPTQ's solution is the start).

Windows that neither GPTQ nor the learning has seen decide whether a block keeps what it learnt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from compress.model.blocks import Call
from compress.quantize.gptq import GptqResult
from compress.quantize.grid import stored_scale
from compress.scheme import QuantizedWeight

WINDOWS_PER_STEP = 8
HELD_OUT_SHARE = 16  # one window of so many, at least one, is kept for the decision
LARGEST_LATENT = 0.49  # distance of a start value from its code: further away GPTQ's own code would be lost


@dataclass(frozen=True)
class RefineSettings:
    """Attributes:
    steps: for each block; 0 learns nothing.
    seed: of the order of the windows.
    rounding_rate: first step of v, in codes.
    scale_rate: first step of a scale, as a share of it.
    """

    steps: int = 0
    seed: int = 0
    rounding_rate: float = 0.001
    scale_rate: float = 0.001


@dataclass(frozen=True)
class Refined:
    """Attributes:
    weights: what was learnt, by module path; None where the held-out windows were no better for it.
    error_before, error_after: L on the held-out windows.
    """

    weights: Mapping[str, QuantizedWeight] | None
    error_before: float
    error_after: float


def held_out(windows: int) -> int:
    """How many of the last windows are kept out of everything but the decision."""
    return max(1, windows // HELD_OUT_SHARE)


class _Layer:
    """Roundings and scales of one layer while they are learnt."""

    def __init__(self, result: GptqResult, transposed: bool, dtype: torch.dtype) -> None:
        codes = result.weight.codes.float()
        self._start = torch.clamp(result.latent, codes - LARGEST_LATENT, codes + LARGEST_LATENT)
        self._zero_point, self._zeros = result.weight.zero_point, _zeros(result.weight)
        groups = (codes == self._zeros).reshape(len(codes), result.weight.scale.shape[1], -1)
        zero = groups.all(dim=-1, keepdim=True).expand_as(groups)  # groups of zeros stay zero
        self._fixed = zero.reshape(codes.shape)
        self._start = torch.where(self._fixed, self._zeros, self._start)
        self._v = torch.zeros_like(codes)
        self._scale = result.weight.scale.to(torch.float32, copy=True)  # moved in place
        self._stored, self._scheme = result.weight.scale.dtype, result.weight.scheme
        self._transposed, self._dtype = transposed, dtype
        self._gradient = torch.zeros_like(codes)
        self.dense = self._dense()

    def _codes(self) -> torch.Tensor:
        low, high = self._scheme.code_range
        return (self._start + self._v).round_().clamp_(low, high)

    def weight(self) -> QuantizedWeight:
        return QuantizedWeight(self._codes().to(torch.int8), self._rounded_scale(), self._zero_point, self._scheme)

    def _rounded_scale(self) -> torch.Tensor:
        return stored_scale(self._scale, self._stored)

    def _dense(self) -> torch.Tensor:
        """The module's weight, a leaf of the graph."""
        dense = self.weight().dequantize(torch.float32).to(self._dtype)
        return (dense.T.contiguous() if self._transposed else dense).requires_grad_()

    def collect(self) -> None:
        """Adds the gradient of one window, in float32."""
        assert self.dense.grad is not None
        gradient = self.dense.grad.float()
        self._gradient += gradient.T if self._transposed else gradient
        self.dense.grad = None

    def move(self, rounding_rate: float, scale_rate: float) -> None:
        out, groups = self._scale.shape
        low, high = self._scheme.code_range
        latent = self._start + self._v
        counted = latent.round().clamp_(low, high) - self._zeros
        by_scale = (self._gradient * counted).reshape(out, groups, -1).sum(dim=-1)
        fixed = self._fixed | (latent < low - 0.5) | (latent > high + 0.5)
        self._v -= rounding_rate * self._gradient.sign().masked_fill_(fixed, 0.0)
        self._scale -= scale_rate * self._scale * by_scale.sign()
        self._gradient.zero_()
        self.dense = self._dense()


def _zeros(weight: QuantizedWeight) -> torch.Tensor:
    """Zero point of every column, float32 [out, in]; [1, 1] where all are 0."""
    if weight.zero_point is None:
        return torch.zeros(1, 1, device=weight.codes.device)
    return weight.zero_point.float().repeat_interleave(weight.codes.shape[1] // weight.scale.shape[1], dim=1)


def refine(
    block: nn.Module,
    results: Mapping[str, tuple[GptqResult, bool]],
    inputs: Sequence[torch.Tensor],
    calls: Sequence[Call],
    targets: Sequence[torch.Tensor],
    settings: RefineSettings,
) -> Refined:
    """Learns one block.

    Args:
        results: by module path, with whether the module holds its weight transposed.
        inputs: [1, T, d] in the quantized model, for each window; the last `held_out` are for the decision.
        targets: [1, T, d], the original block's outputs for the same windows.
    """
    dtype = inputs[0].dtype
    layers = {path: _Layer(result, transposed, dtype) for path, (result, transposed) in results.items()}
    split = len(inputs) - held_out(len(inputs))
    examples = list(zip(inputs, calls, targets, strict=True))
    before = _mean_loss(block, layers, examples[split:])
    generator = torch.Generator().manual_seed(settings.seed)
    queue: list[int] = []
    for step in range(settings.steps):
        while len(queue) < min(WINDOWS_PER_STEP, split):
            queue += torch.randperm(split, generator=generator).tolist()
        batch, queue = queue[:WINDOWS_PER_STEP], queue[WINDOWS_PER_STEP:]
        for window in batch:
            with torch.enable_grad():
                _loss(block, layers, *examples[window]).backward()  # type: ignore[no-untyped-call]
            for layer in layers.values():
                layer.collect()
        share = 1.0 - step / settings.steps
        for layer in layers.values():
            layer.move(settings.rounding_rate * share, settings.scale_rate * share)
    after = _mean_loss(block, layers, examples[split:])
    better = after < before  # also False where it is not finite
    weights = {path: layer.weight() for path, layer in layers.items()} if better else None
    return Refined(weights, before, after)


def _mean_loss(
    block: nn.Module, layers: Mapping[str, _Layer], examples: Sequence[tuple[torch.Tensor, Call, torch.Tensor]]
) -> float:
    with torch.no_grad():
        losses = [float(_loss(block, layers, *example)) for example in examples]
    return sum(losses) / len(losses)


def _loss(
    block: nn.Module, layers: Mapping[str, _Layer], states: torch.Tensor, call: Call, target: torch.Tensor
) -> torch.Tensor:
    replaced = {f"{path}.weight": layer.dense for path, layer in layers.items()}
    output = functional_call(block, replaced, (states, *call.args), call.kwargs)
    found: torch.Tensor = (output[0] if isinstance(output, tuple) else output).float()
    wanted = target.float()
    length = wanted.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
    return (found - wanted).square().sum() / length
