"""Round-to-nearest of one layer, a few rows at a time: rows are rounded on their own, so the result is the same.

What is computed of some rows stays in a core's cache, and beside the weight as it is stored nothing is in memory whole
but its codes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from compress.errors import BrokenResultError
from compress.model.checkpoint import Checkpoint
from compress.quantize.layer import Errors, LayerPlan, nearest, plain, rounded_record
from compress.records import LayerRecord
from compress.scheme import QuantizedWeight

WEIGHTS_AT_ONCE = 2**20


def round_layer(checkpoint: Checkpoint, plan: LayerPlan, device: str) -> tuple[QuantizedWeight, LayerRecord]:
    """The layer rounded to nearest, and its record.

    Raises:
        BrokenResultError: values are NaN or infinite.
    """
    parts: list[QuantizedWeight] = []
    energy = error_before = error_after = 0.0
    zero_groups, digest = 0, hashlib.sha256()
    for W in _rows(checkpoint, plan, device):
        part, simple = nearest(W, plan), plain(W, plan)
        dense = part.dequantize(torch.float32)
        energy += float(W.square().sum())
        error_before += float(simple.dequantize(torch.float32).sub_(W).square_().sum())
        error_after += float((dense - W).square_().sum())
        zero_groups += _zero_groups(W, dense, part.scale.shape[1])
        digest.update(dense.cpu().contiguous().numpy().data)
        parts.append(part)
    errors = Errors(error_before / energy, error_after / energy) if energy > 0 else Errors(0.0, 0.0)
    return _joined(parts), rounded_record(plan, errors, zero_groups, digest.hexdigest())


def _rows(checkpoint: Checkpoint, plan: LayerPlan, device: str) -> Iterator[torch.Tensor]:
    """float32 [rows, in], some rows of the weight after the other."""
    layer = plan.layer
    stored = checkpoint.read(layer.tensor)
    stored = stored.T if layer.transposed else stored
    for start in range(0, layer.out, max(1, WEIGHTS_AT_ONCE // layer.width)):
        W = stored[start : start + max(1, WEIGHTS_AT_ONCE // layer.width)].float().contiguous().to(device)
        low, high = W.aminmax()
        if not bool(torch.isfinite(high - low)):
            raise BrokenResultError(f"{layer.name}: the weight has values that are NaN or infinite.")
        yield W


def _zero_groups(W: torch.Tensor, dense: torch.Tensor, groups: int) -> int:
    """Groups that are all zero in both."""
    rows = W.shape[0]
    largest = W.reshape(rows, groups, -1).abs().amax(dim=-1)
    zero = largest == 0
    if not bool(zero.any()):
        return 0
    return int((zero & (dense.reshape(rows, groups, -1).abs().amax(dim=-1) == 0)).sum())


def _joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    return QuantizedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(zero_points) if zero_points else None,
        parts[0].scheme,
    )
