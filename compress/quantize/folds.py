"""Where the factors of `smooth` go in a checkpoint: the producer as it now stands, and what stands there after it.

A producer comes before its group in the block, so it has been quantized, or left alone, by the time its group is due. A
block in memory needs no change: inside the program the group's weights stand for Q(W s) / s and meet the inputs x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compress.model.anatomy import LinearLayer
from compress.model.checkpoint import Checkpoint
from compress.model.folding import Producer
from compress.quantize.smooth import Folded, Smoothing, folded_norm, folded_rows
from compress.scheme import QuantizedWeight


@dataclass(frozen=True)
class Standing:
    """A producer's tensors before a group's factors are folded into them.

    Attributes:
        weight: norm weight [channels], rows [out, in] as stored, or the quantized layer.
        bias: as stored, or None.
        transposed: the file holds the rows as [in, out].
    """

    producer: Producer
    weight: torch.Tensor | QuantizedWeight
    bias: torch.Tensor | None
    transposed: bool

    @property
    def channels(self) -> torch.Tensor:
        """int64 [in]: the producer's channel of each input of the group."""
        width = self.producer.channels * self.producer.repeats
        return torch.tensor([self.producer.channel_of(i) for i in range(width)])

    def fold(self, s: torch.Tensor) -> Folded:
        """The producer with its outputs divided by s [channels]."""
        if self.producer.kind == "rows":
            return folded_rows(s, self.weight, self.bias, first_row=self.producer.first_row)
        assert isinstance(self.weight, torch.Tensor)
        return folded_norm(s, self.weight, self.bias, plus_one=self.producer.plus_one)


@dataclass(frozen=True)
class Changes:
    """What a fold changes.

    Attributes:
        weights: quantized layers by name, with new scales.
        replaced: tensors by their name in the file, as they are to be stored.
    """

    weights: Mapping[str, QuantizedWeight]
    replaced: Mapping[str, torch.Tensor]


def standing(
    producer: Producer,
    checkpoint: Checkpoint,
    layers: Mapping[str, LinearLayer],
    weights: Mapping[str, QuantizedWeight],
    replaced: Mapping[str, torch.Tensor],
    device: str,
) -> Standing:
    """The producer as it stands: in `weights` if it is quantized, in `replaced` if it was changed before, else as read.

    Args:
        layers: all linear layers by name.
    """

    def stored(name: str) -> torch.Tensor:
        return (replaced[name] if name in replaced else checkpoint.read(name)).to(device)

    layer = layers.get(producer.module)
    transposed = layer is not None and layer.transposed
    bias = None if producer.bias is None else stored(producer.bias)
    quantized = weights.get(producer.module)
    if quantized is not None:
        return Standing(producer, quantized, bias, transposed)
    weight = stored(producer.weight)
    return Standing(producer, weight.T.contiguous() if transposed else weight, bias, transposed)


def changes(before: Standing, folded: Folded) -> Changes:
    """What has to be stored in place of `before`."""
    producer = before.producer
    replaced: dict[str, torch.Tensor] = {}
    weights: dict[str, QuantizedWeight] = {}
    if isinstance(folded.weight, QuantizedWeight):
        weights[producer.module] = folded.weight
    else:
        replaced[producer.weight] = folded.weight.T.contiguous() if before.transposed else folded.weight
    if producer.bias is not None and folded.bias is not None:
        replaced[producer.bias] = folded.bias
    return Changes(weights, replaced)


def smoothing_record(producer: Producer, smoothing: Smoothing) -> dict[str, str | float | None] | None:
    """The field `smoothing` of the records of a group's layers; None where nothing was folded."""
    if smoothing.folded is None:
        return None
    return {
        "producer": producer.module,
        "spread": smoothing.spread,
        "alpha": smoothing.alpha,
        "error_before": smoothing.error_before,
        "error_after": smoothing.error_after,
    }
