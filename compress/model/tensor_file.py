"""Tensors out of a safetensors file by plain reads, at the offsets that its header tells.

The library maps the file, and pages of a mapped file count as memory of the process until it is closed. Reading takes
no more than the tensors themselves, which are aligned as torch aligns them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from compress.errors import BrokenResultError
from compress.model.safetensors_header import TensorInfo

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_tensors(path: Path, tensors: Iterable[TensorInfo]) -> dict[str, torch.Tensor]:
    """Tensors of one file by name, in the dtypes and shapes of the file, in memory of their own.

    Args:
        tensors: as the header of this file lists them.

    Raises:
        BrokenResultError: the file has become shorter since its header was read.
    """
    found, others = {}, []
    with path.open("rb") as file:
        for tensor in tensors:
            if tensor.dtype not in _DTYPES:
                others.append(tensor.name)
                continue
            data = torch.empty(tensor.nbytes, dtype=torch.uint8)
            file.seek(tensor.offset)
            if file.readinto(data.numpy().data) != tensor.nbytes:
                raise BrokenResultError(f"{path} was cut off while it was read: {tensor.name} is incomplete.")
            found[tensor.name] = data.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
    return found | _by_library(path, others)


def _by_library(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """Those of rare dtypes, of less than a byte or without a fixed counterpart in torch."""
    if not names:
        return {}
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}
