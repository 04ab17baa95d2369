"""Writes model.gguf, tensor by tensor, in the layout that `gguf_layout.py` predicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from compress.durable import space_for
from compress.errors import BrokenResultError
from compress.formats.gguf_layout import GgufFile
from compress.formats.gguf_metadata import rope_factors
from compress.formats.gguf_names import FAMILIES, to_file
from compress.formats.stored import StoredTensor
from compress.model.checkpoint import Checkpoint
from compress.model.gguf_header import padded
from compress.progress import Progress
from compress.scheme import QuantizedWeight

_MIDDLE = 8
"""What is added to a 4-bit code to make a nibble."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16}


def write_gguf(
    source: Checkpoint,
    stage: Path,
    planned: GgufFile,
    *,
    layer_of: Mapping[str, str],
    quantized: Callable[[str], QuantizedWeight],
    progress: Progress,
) -> str:
    """Writes the file into `stage`, synced to the disk.

    Args:
        layer_of: {tensor name in the checkpoint: layer name} of the layers that are quantized.
        quantized: gives the quantized weight of a layer, checked, by its name.

    Returns:
        the file's name.

    Raises:
        BrokenResultError: a value that float16 cannot hold.
        MissingResourceError: the disk is full.
    """
    path = stage / planned.file
    model_type = source.model_type
    with (
        progress.phase("write weights", planned.data_bytes) as advance,
        space_for(path, planned.nbytes),
        path.open("wb") as file,
    ):
        _put(file, planned.head)
        for stored, name in zip(planned.tensors, planned.sources, strict=True):
            if name is None:
                factors = rope_factors(FAMILIES[model_type], planned.config) or ()
                data = np.asarray(factors, dtype=np.float32).tobytes()
            elif name in layer_of:
                weight = quantized(layer_of[name])
                codes, scale = (
                    to_file(model_type, planned.config, name, part) for part in (weight.codes, weight.scale)
                )
                data = blocks(codes, scale, stored.dtype)
            else:
                data = _floats(to_file(model_type, planned.config, name, source.read(name)), stored, name)
            if len(data) != stored.nbytes:
                raise BrokenResultError(f"{name}: planned {stored.nbytes} bytes as {stored.dtype}, it has {len(data)}.")
            _put(file, data)
            advance(stored.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return planned.file


def blocks(codes: torch.Tensor, scale: torch.Tensor, dtype: str) -> bytes:
    """Blocks of 32 codes, each behind its scale.

    Args:
        codes: int8 [out, in], -8 to 7 for Q4_0.
        scale: float16 [out, in / 32].
    """
    groups = codes.reshape(scale.numel(), -1).numpy()  # [blocks, 32]
    if dtype == "Q4_0":
        nibbles = (groups + _MIDDLE).astype(np.uint8)
        packed = nibbles[:, :16] | nibbles[:, 16:] << 4
    else:
        packed = groups.view(np.uint8)
    head = scale.to(torch.float16).reshape(-1, 1).contiguous().numpy().view(np.uint8)  # [blocks, 2]
    return np.concatenate([head, packed], axis=1).tobytes()


def _floats(tensor: torch.Tensor, stored: StoredTensor, name: str) -> bytes:
    """An unquantized tensor's bytes, rounded to its type.

    Raises:
        BrokenResultError: a value is too large for float16.
    """
    rounded = tensor.to(_FLOATS[stored.dtype])
    lost = int((~rounded.isfinite()).sum())
    if lost:
        raise BrokenResultError(
            f"{name}: {lost} values are larger than float16 can hold (65504), and a GGUF file stores this tensor so.",
            hint="Choose another --format.",
        )
    return rounded.contiguous().numpy().tobytes()


def _put(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.write(bytes(padded(len(data)) - len(data)))
