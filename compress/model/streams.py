"""The hidden states of all calibration windows in front of a block: in memory, or on the disk if they are too many."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import overload

import torch

from compress.durable import space_for
from compress.model.blocks import Call

Keep = Callable[[Iterable[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes tensors over, one after the other, and gives them back by their number."""


@dataclass
class Streams:
    """Hidden states [1, T, d] of every window in front of the block at hand, and how each block is called.

    Attributes:
        changed: in the model that a step has changed up to this block.
        original: the same windows in the original model; None where no second stream is carried.
        calls: [window][block].
        keep: where new states go.
    """

    changed: Sequence[torch.Tensor]
    original: Sequence[torch.Tensor] | None
    calls: list[list[Call]]
    keep: Keep = list

    def state(self) -> Mapping[str, torch.Tensor]:
        """All of them by name, for `--resume`; each is read when it is asked for."""
        places = {f"changed.{window:06d}": (self.changed, window) for window in range(len(self.changed))}
        if self.original is not None:
            places |= {f"original.{window:06d}": (self.original, window) for window in range(len(self.original))}
        return _Named(places)

    def restore(self, state: Mapping[str, torch.Tensor] | None) -> None:
        if not state:
            return
        self.changed = self.keep(state[name] for name in sorted(state) if name.startswith("changed."))
        if self.original is not None:
            self.original = self.keep(state[name] for name in sorted(state) if name.startswith("original."))


def first_streams(
    inputs: Callable[[torch.Tensor], tuple[torch.Tensor, list[Call]]],
    windows: Sequence[torch.Tensor],
    *,
    two: bool,
    spill: Path | None,
) -> Streams:
    """Inputs of block 0; calls depend on the length alone, so windows of one length share them.

    Args:
        inputs: hidden states [1, T, d] and calls for ids [T].
        two: carry the second stream.
        spill: folder in which they wait; None for memory.
    """
    calls: list[list[Call]] = []
    by_length: dict[int, list[Call]] = {}

    def states() -> Iterator[torch.Tensor]:
        for ids in windows:
            hidden, called = inputs(ids)
            calls.append(by_length.setdefault(len(ids), called))
            yield hidden.cpu().contiguous()

    keep: Keep = list if spill is None else partial(spilled, spill)
    changed = keep(states())
    return Streams(changed, keep(changed) if two else None, calls, keep)


def spilled(folder: Path, tensors: Iterable[torch.Tensor]) -> Spilled:
    """Writes tensors of any dtypes and shapes to a file without a name in `folder`, which ends with the last use."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = Spilled(folder)
    for tensor in tensors:
        kept.append(tensor)
    return kept


@dataclass(frozen=True)
class _Place:
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Spilled(Sequence[torch.Tensor]):
    """Tensors in a file, read one by one into memory of their own."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the tensors are needed
        self._named = folder / "activations"
        self._places: list[_Place] = []

    def append(self, tensor: torch.Tensor) -> None:
        """Raises MissingResourceError: the disk is full."""
        with space_for(self._named, tensor.nbytes):
            offset = self._file.seek(0, 2)
            self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._file.flush()
        self._places.append(_Place(offset, tensor.dtype, tuple(tensor.shape)))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = self._places[index]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        self._file.seek(place.offset)
        self._file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return tensor


@dataclass(frozen=True)
class _Named(Mapping[str, torch.Tensor]):
    places: Mapping[str, tuple[Sequence[torch.Tensor], int]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensors, index = self.places[name]
        return tensors[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
