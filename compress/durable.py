"""Files that are on the disk whole or not at all, whatever happens: tensors and bytes, synced, with their SHA-256."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import MissingResourceError

if TYPE_CHECKING:
    import torch

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ALIGNMENT = 8  # bytes; headers are filled up to it, as the safetensors library does


def write_bytes(path: Path, data: bytes) -> str:
    """Writes a small file and returns its SHA-256. Raises as `write_tensors` does."""
    return _write(path, [data], len(data))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes a safetensors file and returns its SHA-256; one tensor at a time is copied to the host, none twice.

    Args:
        tensors: may read each tensor anew whenever it is asked for; none is kept.

    Raises:
        MissingResourceError: the disk is full; says how much the file needs. The file at `path` is as it was.
    """
    forms = {name: _Form(tensor.dtype, tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()}
    # The widest first, so that every tensor starts at a multiple of its item's size.
    names = sorted(forms, key=lambda name: (-forms[name].dtype.itemsize, name))
    header = _header({name: forms[name] for name in names})
    chunks = (_bytes_of(tensors[name]) for name in names)
    return _write(path, _chain(header, chunks), len(header) + sum(form.nbytes for form in forms.values()))


class FileTensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a file, read one by one."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._path = path
        with safe_open(path, framework="pt") as file:
            self._names = tuple(file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self._path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name).clone()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ReadLater(Mapping[str, "torch.Tensor"]):
    """Tensors by name, each read anew when it is asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where the system can."""
    with suppress(OSError):  # some systems and file systems open or sync no folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def stamp(path: Path) -> tuple[int, ...]:
    """What is another one after a file was changed; empty where there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return ()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def space_for(path: Path, needed: int) -> Iterator[None]:
    """Turns "no space left" into an error that says which file, how much it needs and how much is free."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise MissingResourceError(
            f"{path}: the disk is full: the file needs {needed:,} bytes, {free:,} are free.",
            hint="Free some space, or choose another output with -o.",
        ) from error


def _write(path: Path, chunks: Iterable[bytes | memoryview], size: int) -> str:
    temporary = path.with_name(path.name + ".new")
    digest = hashlib.sha256()
    with space_for(path, size):
        try:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    sync_folder(path.parent)
    return digest.hexdigest()


def _chain(first: bytes, rest: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    yield first
    yield from rest


@dataclass(frozen=True)
class _Form:
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def _header(tensors: Mapping[str, _Form]) -> bytes:
    """Length (8 bytes, little-endian) and JSON of the safetensors format, in the order of the tensors."""
    names, offset, entries = _dtype_names(), 0, {}
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _dtype_names() -> dict[torch.dtype, str]:
    import torch

    return {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
    }


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in C order; little-endian, as torch's wheels."""
    import torch

    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
