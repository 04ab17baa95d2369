"""Tensors and weight files as they will stand on disk: exact names, shapes, dtypes and bytes, without torch.

A safetensors file is

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces to a multiple of 8
    data      the tensors, without gaps

and the library's order of tensors, kept here, is: wider dtypes first, then by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from compress.model.safetensors_header import tensor_bytes

# The order in which the safetensors library lays dtypes out.
_DTYPES = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8"),
    *("F6_E3M2", "F6_E2M3", "F4", "BOOL"),
)
DTYPE_ORDER = {dtype: position for position, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an output file. `dtype` is safetensors' name ("BF16"), or ggml's where there is none ("Q4_0")."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


class WeightFile(Protocol):
    """One planned weight file of any format."""

    @property
    def file(self) -> str:
        """Its name."""

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """In the order of the file."""

    @property
    def nbytes(self) -> int:
        """Size of the file, header included."""


@dataclass(frozen=True)
class Shard:
    """One weight file: `tensors` in the order of the file."""

    file: str
    tensors: tuple[StoredTensor, ...]

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Size of the file, header included."""
        return len(self.header()) + self.data_bytes

    def header(self) -> bytes:
        """Everything before the data, as the safetensors library writes it."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in self.tensors:
            end = offset + tensor.nbytes
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (offset, end),
            }
            offset = end
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def shard_layout(tensors: Iterable[StoredTensor], max_shard_size: int) -> tuple[Shard, ...]:
    """Splits tensors over files as transformers does: greedily in the order of names, by bytes of tensors.

    A tensor larger than `max_shard_size` gets a file of its own.
    """
    parts: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        if parts[-1] and size + tensor.nbytes > max_shard_size:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    return tuple(Shard(_file_name(index, len(parts)), _file_order(part)) for index, part in enumerate(parts))


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _file_order(tensors: Iterable[StoredTensor]) -> tuple[StoredTensor, ...]:
    return tuple(sorted(tensors, key=lambda tensor: (DTYPE_ORDER[tensor.dtype], tensor.name)))
