"""The proof of a folder whose whole model does not fit into memory: one block at a time, in both processes.

The process that wrote the folder sends a few windows through the blocks with the weights that it meant to write
(`meant_outputs`). The fresh process reads every layer from the folder by the independent reader, checks it bit for bit
and sends the same windows through what it read (`walk_checks`). The head is no part of the walk: as every tensor that
was not quantized, it is compared with the original's, bit for bit. Inputs of layers that are rounded at run time are
not rounded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compress.errors import CompressError
from compress.formats.plain import cast_tensor
from compress.formats.proof import ProofCheck
from compress.formats.proof_inputs import read_cases
from compress.formats.read import open_reader
from compress.model.anatomy import Anatomy, LinearLayer, anatomy
from compress.model.blocks import BlockModel, run_block
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.model.heap import trim_heap
from compress.scheme import QuantizedWeight

METHOD = "independent reader, block by block"
_LISTED = 10


@dataclass(frozen=True)
class Walked:
    """How the outputs compare: `difference` is the largest one, as a share of the range of the measured outputs."""

    checks: tuple[ProofCheck, ...]
    difference: float | None
    windows: int
    tokens: int


def meant_outputs(
    source: Checkpoint,
    parts: Anatomy,
    windows: Sequence[torch.Tensor],
    *,
    layers: Sequence[LinearLayer],
    quantized: Callable[[str], QuantizedWeight],
    replaced: Mapping[str, torch.Tensor],
    cast: str | None,
) -> list[torch.Tensor]:
    """Last hidden states, float32 [T, d] for each window of ids [T], of the model that was to be written.

    Args:
        layers: those that are quantized.
        quantized: the weight of such a layer by its name.
        replaced: tensors in the place of the source's, by their names in the file.
        cast: dtype of a plain cast, else None.
    """
    owners = {layer.tensor: layer for layer in layers}

    def read(name: str) -> torch.Tensor:
        layer = owners.get(name)
        if layer is not None:
            return _dense(quantized(layer.name), layer)
        return cast_tensor(name, replaced[name] if name in replaced else source.read(name), cast)

    return walk(source, parts, windows, read)


def walk_checks(stage: Path, source: Path, outputs: Path, weight_sha256: Mapping[str, str], limit: float) -> Walked:
    """Weights and outputs of a folder, read layer by layer and computed block by block.

    Args:
        source: whose config and anatomy the weights have; the folder itself where it is a pruned model.
        outputs: file of windows and of `meant_outputs` for them.
        weight_sha256: hashes of the dequantized float32 weights [out, in], by layer.
        limit: the largest difference of an output that is allowed, as a share of the outputs' range.
    """
    cases = [(inputs["input_ids"][0], measured) for inputs, measured in read_cases(outputs)]
    try:
        original = open_checkpoint(source)
        read = _FolderWeights(stage, original, weight_sha256)
        found = walk(original, read.anatomy, [ids for ids, _ in cases], read)
    except CompressError as error:
        return Walked((ProofCheck("loading", False, error.message),), None, 0, 0)
    compared = _compared([measured for _, measured in cases], found, limit)
    checks = (compared[0],) if not weight_sha256 else (compared[0], read.check())
    return Walked(checks, compared[1], len(cases), sum(len(ids) for ids, _ in cases))


class _FolderWeights:
    """The weights of a written folder by the names of the original's tensors; every layer is checked as it is read."""

    def __init__(self, stage: Path, original: Checkpoint, weight_sha256: Mapping[str, str]) -> None:
        self.anatomy = anatomy(original)
        self._reader, self._folder, self._expected = open_reader(stage), open_checkpoint(stage), weight_sha256
        self._owners = {layer.tensor: layer for layer in self.anatomy.layers if layer.name in weight_sha256}
        self._names = {_short(self.anatomy, name): name for name in self._reader.quantized_names}
        self._seen: set[str] = set()
        self._faults: list[str] = []

    def __call__(self, name: str) -> torch.Tensor:
        layer = self._owners.get(name)
        if layer is None:
            return self._folder.read(name)
        weight = self._reader.quantized(self._names.get(_short(self.anatomy, layer.name), layer.name))
        dense = weight.dequantize(torch.float32)
        if hashlib.sha256(dense.contiguous().numpy().data).hexdigest() != self._expected[layer.name]:
            self._faults.append(f"{layer.name}: the weight differs from ours")
        self._seen.add(layer.name)
        return dense.T.contiguous() if layer.transposed else dense

    def check(self) -> ProofCheck:
        faults = [*self._faults, *(f"{name}: was not read" for name in sorted(self._expected.keys() - self._seen))]
        more = f"; and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        good = f"{len(self._expected)} weights equal ours, bit for bit"
        return ProofCheck("weights", not faults, "; ".join(faults[:_LISTED]) + more if faults else good)


@torch.no_grad()
def walk(
    source: Checkpoint,
    parts: Anatomy,
    windows: Sequence[torch.Tensor],
    read: Callable[[str], torch.Tensor],
    blocks: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Last hidden states, float32 [T, d], of a model with the source's config and the weights that `read` gives.

    Args:
        blocks: those that the windows go through, in this order; None for all.
    """
    model = BlockModel(source, parts, dtype=torch.float32, device="cpu", read=read)
    entered = [model.inputs(ids) for ids in windows]
    hidden = [states for states, _ in entered]
    model.drop_outside()
    for index in range(len(model)) if blocks is None else blocks:
        with model.block(index) as block:
            hidden = [
                run_block(block, states, calls[index]) for states, (_, calls) in zip(hidden, entered, strict=True)
            ]
        trim_heap()  # codes of all blocks would stay in the heap
    return [model.last_hidden_state(ids, states)[0] for ids, states in zip(windows, hidden, strict=True)]


def _compared(
    measured: Sequence[torch.Tensor], found: Sequence[torch.Tensor], limit: float
) -> tuple[ProofCheck, float]:
    finite = all(bool(one.isfinite().all()) for one in (*measured, *found))
    span = float(max(one.max() for one in measured) - min(one.min() for one in measured)) or 1.0
    largest = max(float((one - other).abs().max()) for one, other in zip(measured, found, strict=True)) / span
    good = finite and largest <= limit  # NaN fails
    detail = f"largest difference of the last hidden states {largest:.3g} of their range"
    return ProofCheck("outputs", good, detail if good else f"{detail}, allowed {limit:g}; finite: {finite}"), largest


def _dense(weight: QuantizedWeight, layer: LinearLayer) -> torch.Tensor:
    dense = weight.dequantize(torch.float32)
    return dense.T.contiguous() if layer.transposed else dense


def _short(parts: Anatomy, name: str) -> str:
    """A layer's name without the base model's prefix, which files have or lack."""
    prefix = parts.architecture.base + "."
    return name.removeprefix(prefix)
