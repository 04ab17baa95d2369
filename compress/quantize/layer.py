"""One layer: what is planned for it, what is done to it, and the record of that."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from compress.errors import BrokenResultError
from compress.model.anatomy import LinearLayer
from compress.model.checkpoint import Checkpoint
from compress.quantize.bitsandbytes_rounding import check_half, quantize_llm_int8, quantize_nf4
from compress.quantize.float8 import quantize_float8
from compress.quantize.gptq import GptqResult, GptqSettings, Prepared, gptq
from compress.quantize.grid import covering_grid, output_errors, quantize_nearest, searched_grid
from compress.quantize.statistics import Statistics
from compress.records import LayerRecord
from compress.scheme import QuantizedWeight, Scheme

# Without data large errors hurt more than their square says: 2.4 measures better than 2 on the sample models.
NEAREST_POWER = 2.4


@dataclass(frozen=True)
class LayerPlan:
    """What is to happen to one layer.

    Attributes:
        scale_dtype: dtype in which the format stores the scales.
        smooth: fold factors into what produces the inputs, where that can take them over.
    """

    layer: LinearLayer
    scheme: Scheme
    target: str
    algorithm: Literal["gptq", "rtn"]
    scale_dtype: torch.dtype
    smooth: bool = False


def read_weight(checkpoint: Checkpoint, layer: LinearLayer) -> torch.Tensor:
    """float32 [out, in], whatever the file's dtype and orientation.

    Raises:
        BrokenResultError: values are NaN or infinite; rounding would hide them from all that comes later.
    """
    stored = checkpoint.read(layer.tensor).float()
    if not bool(torch.isfinite(stored).all()):
        raise BrokenResultError(f"{layer.name}: the weight has values that are NaN or infinite.")
    return stored.T.contiguous() if layer.transposed else stored


def nearest(W: torch.Tensor, plan: LayerPlan) -> QuantizedWeight:
    """Round to nearest, all columns alike: at 4 bits with scales searched for the least |error|^2.4.

    At 8 bits clipping the largest weights costs more than the finer grid gains (scripts/bench_quantization.json), and
    bitsandbytes has no choice of scales.
    """
    if plan.scheme.bits == 8 or plan.scheme.values != "int":
        return plain(W, plan)
    grid = searched_grid(W, plan.scheme, plan.scale_dtype, power=NEAREST_POWER)
    return quantize_nearest(W, grid.scale, plan.scheme, grid.zero_point)


def plain(W: torch.Tensor, plan: LayerPlan) -> QuantizedWeight:
    """Round to nearest with scales that the largest weights decide.

    Raises:
        BrokenResultError: see `check_half`.
    """
    match plan.scheme.values:
        case "float":
            return quantize_float8(W, plan.scheme, plan.scale_dtype)
        case "nf4":
            return quantize_nf4(W, plan.scheme)
        case "llm_int8":
            check_half(plan.layer.name, W)
            return quantize_llm_int8(W, plan.scheme)
    grid = covering_grid(W, plan.scheme, plan.scale_dtype)
    return quantize_nearest(W, grid.scale, plan.scheme, grid.zero_point)


def quantize_layer(
    plan: LayerPlan,
    W: torch.Tensor,
    prepared: Prepared | None,
    settings: GptqSettings,
    target: torch.Tensor | None = None,
) -> GptqResult:
    """Codes and scales of one layer by the planned algorithm; rtn needs nothing prepared, and no target."""
    if plan.algorithm == "rtn" or prepared is None:
        return GptqResult(nearest(W, plan), W, W, None)
    return gptq(W, prepared, plan.scheme, scale_dtype=plan.scale_dtype, settings=settings, target=target)


def check_finite_statistics(name: str, statistics: Statistics) -> None:
    """Stops at the first layer whose inputs overflow or are NaN, before anything is made of them.

    Raises:
        BrokenResultError: the statistics are not finite.
    """
    sums = (statistics.H, statistics.input_drift, statistics.residual_drift)
    if all(one is None or bool(torch.isfinite(one).all()) for one in sums):
        return
    raise BrokenResultError(
        f"{name}: the calibration statistics are not finite (width {statistics.H.shape[0]}, {statistics.tokens} "
        "tokens): the inputs of this layer overflow or are NaN. No later layer was looked at.",
        hint="Run the original model on this text and look at this layer's inputs; weights before it are broken "
        "or too large.",
    )


@dataclass(frozen=True)
class Facts:
    """What a group's inputs were, for the records of its layers.

    Attributes:
        H: float32 [in, in], mean of x x^T; None without calibration.
        tokens: number of tokens behind it.
        dead: inputs that were zero, or next to it, for every token.
        smoothing: float32 [in], factors that the stored weight carries and the inputs lack; None for none.
    """

    H: torch.Tensor | None
    tokens: int | None
    dead: int = 0
    smoothing: torch.Tensor | None = None

    def unsmoothed(self, dense: torch.Tensor) -> torch.Tensor:
        """A weight [out, in] as it meets the inputs x."""
        return dense if self.smoothing is None else dense / self.smoothing


def layer_record(
    plan: LayerPlan,
    W: torch.Tensor,
    result: GptqResult,
    facts: Facts,
    settings: GptqSettings,
    note: str | None = None,
) -> LayerRecord:
    """The record of a layer W [out, in], not smoothed, quantized on calibration data."""
    notes = [] if note is None else [note]
    if facts.dead:
        notes.append(f"{facts.dead} inputs were zero, or next to it, for every calibration token")
    algorithm = plan.algorithm
    if plan.algorithm == "gptq" and facts.tokens == 0:
        notes.append("no calibration token reached this expert: rounded to nearest")
        algorithm = "rtn"
    elif plan.algorithm == "gptq" and result.damping is None:
        notes.append("the Hessian could not be factored at any damping: rounded to nearest")
        algorithm = "rtn"
    elif plan.algorithm == "gptq" and result.damping != settings.damping:
        notes.append(f"damping raised from {settings.damping:g} to {result.damping:g}: the Hessian was singular")
    target = facts.unsmoothed(result.target)
    return record(plan, W, result.weight, facts, algorithm, damping=result.damping, notes=notes, target=target)


def record(
    plan: LayerPlan,
    W: torch.Tensor,
    weight: QuantizedWeight,
    facts: Facts,
    algorithm: str,
    *,
    damping: float | None = None,
    notes: Sequence[str] = (),
    target: torch.Tensor | None = None,
) -> LayerRecord:
    """The record of a quantized layer; see `LayerRecord` for its errors.

    Args:
        target: float32 [out, in], the weights whose outputs the codes were fitted to; None for W itself.
    """
    target = W if target is None else target
    simple = plain(W, plan)
    dense = weight.dequantize(torch.float32)
    both = (W == 0) & (dense == 0)
    zero_groups = int(both.reshape(W.shape[0], weight.scale.shape[1], -1).all(dim=-1).sum())
    before, after = output_errors(target, [simple.dequantize(torch.float32), facts.unsmoothed(dense)], facts.H)
    return LayerRecord(
        name=plan.layer.name,
        shape=(plan.layer.out, plan.layer.width),
        target=plan.target,
        algorithm=algorithm,
        group_size=plan.scheme.group_size,
        scheme=plan.scheme.label,
        damping=damping,
        rank_bound=None if facts.tokens is None else min(facts.tokens, plan.layer.width),
        tokens=facts.tokens,
        error_before=before,
        error_after=after,
        notes=(*notes, *_zero_note(zero_groups)),
        sha256=weight_sha256(weight),
    )


@dataclass(frozen=True)
class Errors:
    """Relative errors of a layer's output with max-abs rounding to nearest (`before`) and as it is stored."""

    before: float
    after: float


def rounded_record(plan: LayerPlan, errors: Errors, zero_groups: int, sha256: str) -> LayerRecord:
    """The record of a layer that was rounded to nearest without calibration data."""
    return LayerRecord(
        name=plan.layer.name,
        shape=(plan.layer.out, plan.layer.width),
        target=plan.target,
        algorithm="rtn",
        group_size=plan.scheme.group_size,
        scheme=plan.scheme.label,
        error_before=errors.before,
        error_after=errors.after,
        notes=_zero_note(zero_groups),
        sha256=sha256,
    )


def _zero_note(zero_groups: int) -> tuple[str, ...]:
    return (f"{zero_groups} groups are all zero and stay exactly zero",) if zero_groups else ()


def weight_sha256(weight: QuantizedWeight) -> str:
    """SHA-256 of the dequantized float32 weight, row-major."""
    dense = weight.dequantize(torch.float32)
    return hashlib.sha256(dense.cpu().contiguous().numpy().tobytes()).hexdigest()
