"""The header of a GGUF file, read by hand: names, types, shapes and places of its tensors, without numpy.

A file is, all little-endian,

    magic "GGUF", version (u32), number of tensors (u64), number of metadata entries (u64)
    metadata  a key (string), a type (u32) and a value each
    tensors   name (string), number of dimensions (u32), dimensions (u64 each, the innermost first),
              type (u32), offset of the data (u64, counted from the start of the data)
    padding to a multiple of the alignment, then the data, every tensor padded likewise

where a string is its length in bytes (u64) and UTF-8. Source: ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from compress.errors import MissingResourceError
from compress.model.safetensors_header import BLOCKS, HeaderError, TensorInfo

GGUF_FILE = "model.gguf"
ALIGNMENT = 32
GGML_TYPES: Mapping[int, str] = {0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 30: "BF16"}
"""The numbers of ggml's types that are known here; F32, F16 and BF16 go by safetensors' names."""

_MAGIC, _VERSION = b"GGUF", 3
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a metadata value of each type of fixed width."""
_ALIGNMENT_KEY = b"general.alignment"


def read_gguf_header(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of a file in their order. No data is read.

    Raises:
        HeaderError: no complete GGUF file of version 3, or types of tensors that are not known here.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            tensors, alignment = _parsed(file, path.name)
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise HeaderError(f"is cut off or damaged in its header ({error})") from error
        start = padded(file.tell(), alignment)
    end = start
    found = []
    for info in tensors:
        if start + info.offset != end:
            raise HeaderError(f"has a hole or an overlap before tensor {info.name}")
        found.append(replace(info, offset=end))
        end = padded(end + info.nbytes, alignment)
    if end != size:
        raise HeaderError(f"{'is cut off' if size < end else 'has bytes after its last tensor'}: {end} bytes expected")
    return tuple(found)


def padded(position: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment`."""
    return -(-position // alignment) * alignment


def gguf_package() -> ModuleType:
    """The `gguf` package.

    Raises:
        MissingResourceError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingResourceError(
            f"GGUF files are written and read with the package `gguf`, which cannot be imported ({error}).",
            hint='Install it: pip install "compress[gguf]" (or: pip install gguf).',
        ) from error
    return gguf


def _parsed(file: BinaryIO, shard: str) -> tuple[list[TensorInfo], int]:
    """The tensors, their offsets counted from the start of the data, and the alignment."""
    magic = file.read(4)
    if magic != _MAGIC:
        raise HeaderError("is not a GGUF file: it does not begin with GGUF")
    version = _number(file, "<I")
    if version != _VERSION:
        raise HeaderError(f"is GGUF of version {version}; version {_VERSION} is read here")
    tensors, entries = _number(file, "<Q"), _number(file, "<Q")
    alignment = ALIGNMENT
    for _ in range(entries):
        key, kind = _string(file), _number(file, "<I")
        if key == _ALIGNMENT_KEY and kind == _UINT32:
            alignment = _number(file, "<I") or ALIGNMENT
        else:
            _skip(file, kind)
    return [_tensor(file, shard) for _ in range(tensors)], alignment


def _tensor(file: BinaryIO, shard: str) -> TensorInfo:
    name = _string(file).decode("utf-8")
    dimensions = _number(file, "<I")
    if dimensions > 4:
        raise HeaderError(f"gives tensor {name} {dimensions} dimensions")
    shape = tuple(_number(file, "<Q") for _ in range(dimensions))[::-1]
    kind, offset = _number(file, "<I"), _number(file, "<Q")
    if kind not in GGML_TYPES:
        raise HeaderError(f"has tensor {name} of ggml's type {kind}, which is not read here")
    dtype = GGML_TYPES[kind]
    if dtype in BLOCKS and (not shape or shape[-1] % BLOCKS[dtype][0]):
        raise HeaderError(f"has tensor {name} of type {dtype} whose rows are no whole blocks: {list(shape)}")
    return TensorInfo(name, dtype, shape, shard, offset)


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        file.seek(_number(file, "<Q"), 1)
    elif kind == _ARRAY:
        inner, count = _number(file, "<I"), _number(file, "<Q")
        if inner in _WIDTHS:
            file.seek(count * _WIDTHS[inner], 1)
        else:
            for _ in range(count):
                _skip(file, inner)
    elif kind in _WIDTHS:
        file.seek(_WIDTHS[kind], 1)
    else:
        raise HeaderError(f"has metadata of the unknown type {kind}")


def _string(file: BinaryIO) -> bytes:
    length = _number(file, "<Q")
    text = file.read(length)
    if len(text) != length:
        raise struct.error("a string ends early")
    return text


def _number(file: BinaryIO, form: str) -> int:
    value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
    return value
