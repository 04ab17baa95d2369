"""Values of a GGUF file's tensors, through the `gguf` package's own dequantization."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from compress.errors import BrokenResultError
from compress.model.gguf_header import gguf_package
from compress.model.safetensors_header import TensorInfo

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensors(path: Path, tensors: Iterable[TensorInfo]) -> dict[str, torch.Tensor]:
    """Tensors by name, in the dtype of the file; blocks of codes dequantized, in float32.

    Args:
        tensors: as the header of this file lists them.

    Raises:
        BrokenResultError: the file has become shorter since its header was read.
    """
    return {info.name: _values(raw_tensor(path, info), info).reshape(info.shape) for info in tensors}


def raw_tensor(path: Path, info: TensorInfo) -> npt.NDArray[np.uint8]:
    """The bytes of one tensor. Errors as for `read_tensors`."""
    with path.open("rb") as file:
        file.seek(info.offset)
        raw = np.frombuffer(file.read(info.nbytes), dtype=np.uint8)
    if raw.size != info.nbytes:
        raise BrokenResultError(f"{path} was cut off while it was read: {info.name} is incomplete.")
    return raw


def _values(raw: npt.NDArray[np.uint8], info: TensorInfo) -> torch.Tensor:
    if info.dtype in _PLAIN:
        return torch.from_numpy(raw.copy()).view(_PLAIN[info.dtype])
    gguf = gguf_package()
    rows = raw.reshape(math.prod(info.shape[:-1]), -1)
    values = gguf.dequantize(rows, gguf.GGMLQuantizationType[info.dtype])
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
