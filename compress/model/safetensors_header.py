"""The header of a safetensors file, read and checked by hand: names, dtypes and shapes without torch.

A file is an unsigned 64-bit little-endian header length N, N bytes of JSON, then the data. The JSON maps each
tensor name to `dtype`, `shape` and `data_offsets` (begin, end, counted from the start of the data); the
offsets cover the data without holes. Source: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.model.json_text import parse_json

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

BLOCKS: Mapping[str, tuple[int, int]] = {"Q4_0": (32, 18), "Q8_0": (32, 34)}
"""Types of GGUF files: values in a block and its bytes (scales included). No safetensors file has them."""

_PREFIX = 8  # bytes of the header's length
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. `dtype` is the safetensors name ("BF16", "F32", "I8"); `shard` the file it is in.

    Attributes:
        offset: position in the file of its first byte; 0 where no header of the file told it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int = field(default=0, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of data in the file."""
        return tensor_bytes(self.dtype, self.shape)


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; those of GGUF come in blocks of values."""
    if dtype in BLOCKS:
        values, size = BLOCKS[dtype]
        return math.prod(shape) // values * size
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


class HeaderError(ValueError):
    """The file is no complete safetensors file; the message says why, without the file's name."""


def read_header(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of one file, in the order of their data. No data is read.

    Raises:
        HeaderError: not a safetensors file, a hole or an overlap in the data, or a file shorter or longer
            than its header says.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_length = _header_length(prefix, prefix + file.read(len(_LFS_POINTER) - 8), size)
        file.seek(8)
        raw = file.read(header_length)
    tensors, data_length = parse_header(raw, path.name)
    if (expected := 8 + header_length + data_length) != size:
        state = "is cut off" if size < expected else "has bytes after its last tensor"
        raise HeaderError(f"{state}: {expected} bytes expected, {size} found")
    return tensors


def _header_length(prefix: bytes, start: bytes, size: int) -> int:
    if start.startswith(_LFS_POINTER):
        raise HeaderError("is a Git LFS pointer, not the file itself (run `git lfs pull` in the model's repository)")
    if len(prefix) < 8:
        raise HeaderError(f"is cut off: at least 8 bytes expected, {size} found")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"is not a safetensors file: its first 8 bytes announce a header of {length} bytes")
    if 8 + length > size:
        raise HeaderError(f"is cut off inside its header: at least {8 + length} bytes expected, {size} found")
    return length


def parse_header(raw: bytes, shard: str) -> tuple[tuple[TensorInfo, ...], int]:
    """The tensors of a header's JSON, in the order of their data, and the length of the data in bytes."""
    try:
        header = parse_json(raw)
    except ValueError as error:
        raise HeaderError(f"has a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise HeaderError("has a header that is not a JSON object")
    data = _PREFIX + len(raw)
    entries = [_parse_entry(name, value, shard, data) for name, value in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: entry[1:])
    position = 0
    for tensor, begin, end in entries:
        if begin != position:
            kind = "a hole" if begin > position else "an overlap"
            raise HeaderError(f"has {kind} before tensor {tensor.name}: it starts at {begin}, expected {position}")
        if end - begin != tensor.nbytes:
            kind = f"{tensor.dtype} {list(tensor.shape)}"
            raise HeaderError(f"gives tensor {tensor.name} {end - begin} bytes; {kind} takes {tensor.nbytes}")
        position = end
    return tuple(tensor for tensor, _, _ in entries), position


def _parse_entry(name: str, value: Any, shard: str, data: int) -> tuple[TensorInfo, int, int]:
    """The tensor and its offsets; `data` is the position in the file that they are counted from."""
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise HeaderError(f"has a malformed header entry for tensor {name}") from error
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers)
    # Also of an empty tensor: no library can count the steps between its elements in more than 63 bits.
    if not whole or math.prod(max(number, 1) for number in shape) >= 2**63:
        raise HeaderError(f"has a malformed shape or offset for tensor {name}")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderError(f"has tensor {name} of the unknown dtype {dtype!r}")
    return TensorInfo(name, dtype, tuple(shape), shard, data + begin), begin, end
