"""The finished parts of a running job, on disk, so that a killed run goes on where it stopped.

A run works in `.NAME.partial` beside its output. After every block its quantized weights are one safetensors file under
`parts/`, the activations that enter the next block are in `state/`, and then `journal.json` names both with their
SHA-256, beside the fingerprint of everything that the bytes depend on. What no journal names does not exist; what does
not have its hash is computed again. The newest state alternates between two files: while one is written the journal
names the other, so a kill at any moment leaves a whole one. Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.durable import FileTensors, ReadLater, sha256, stamp, sync_folder, write_bytes, write_tensors
from compress.errors import BrokenResultError, CompressError
from compress.fingerprint import check_same, flat
from compress.records import LayerRecord
from compress.scheme import QuantizedWeight, Scheme

if TYPE_CHECKING:
    import torch

LISTING, PARTS, STATE = "journal.json", "parts", "state"
NAMES = (LISTING, PARTS, STATE)
"""What a journal has in its folder."""
AHEAD = "ahead-"
"""What the name of a part begins with that is none of the work on blocks or layers, but what it starts from."""
_VERSION = 1

SavePart = Callable[
    [
        str,
        Mapping[str, QuantizedWeight],
        Sequence[LayerRecord],
        Mapping[str, "torch.Tensor"],
        "Mapping[str, torch.Tensor] | None",
    ],
    None,
]
"""What a step calls after every block: see `Journal.save`."""


@dataclass(frozen=True)
class Resumed:
    """What an interrupted run had finished.

    Attributes:
        parts: names of the finished parts, in the order of the work.
        records: of all of them, in order.
        weights: the weight of a layer of these parts.
        state: what was saved with the last part; None where it needs none.
        replaced: the tensors of the checkpoint that these parts changed, by their name in the file.
    """

    parts: tuple[str, ...]
    records: tuple[LayerRecord, ...]
    weights: Callable[[str], QuantizedWeight]
    state: Mapping[str, torch.Tensor] | None
    replaced: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    name: str
    sha256: str
    layers: Mapping[str, Scheme]
    records: tuple[LayerRecord, ...]
    replaced: tuple[str, ...]
    stateful: bool  # the work after it needs the state that was saved with it


@dataclass(frozen=True)
class _State:
    file: str
    part: str
    sha256: str


class Journal:
    """Parts of one run. Made by `start` or `reopen`.

    Attributes:
        lost: parts that `reopen` could not use, nor what came after them: damaged, or without their state.
    """

    def __init__(
        self, folder: Path, fingerprint: Mapping[str, Any], parts: Sequence[_Part] = (), state: _State | None = None
    ) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self._parts, self._state = list(parts), state
        self._checked: dict[Path, tuple[int, ...]] = {}
        self._listed: dict[str, dict[str, Any]] = {}
        self.lost: tuple[str, ...] = ()

    @classmethod
    def start(cls, folder: Path, fingerprint: Mapping[str, Any]) -> Journal:
        """A journal without parts, in `folder`, the run's `.NAME.partial`.

        Args:
            fingerprint: everything that the bytes of the parts depend on, as JSON; see `reopen`.
        """
        journal = cls(folder, flat(fingerprint))
        journal._clear_unnamed()
        journal._write(journal._parts, None)
        sync_folder(folder.parent)
        return journal

    @classmethod
    def reopen(cls, folder: Path, fingerprint: Mapping[str, Any]) -> Journal:
        """The journal that an interrupted run left in `folder`; an empty one where there is none that can be read.

        Every file is checked by its hash. From the first damaged part on, all are dropped (`lost`); if the state that
        the last whole part needs is damaged or belongs to a dropped part, all parts are.

        Raises:
            MismatchError: the interrupted run had another fingerprint; every difference is named. Nothing is changed.
        """
        listing = _read(folder)
        if listing is None:
            return cls.start(folder, fingerprint)
        check_same(folder, listing["fingerprint"], flat(fingerprint))
        _make_folders(folder)
        parts: list[_Part] = listing["parts"]
        state: _State | None = listing["state"]
        whole = list(takewhile(lambda part: _intact(_part_path(folder, part.name), part.sha256), parts))
        if whole and whole[-1].stateful and not _carries(folder, state, whole[-1]):
            whole = []
        journal = cls(folder, flat(fingerprint), whole, state if whole else None)
        journal.lost = tuple(part.name for part in parts[len(whole) :])
        journal._clear_unnamed()
        if journal.lost:
            journal._write(journal._parts, journal._state)
        return journal

    @property
    def scratch(self) -> Path:
        """A folder for files without a name, on the disk that holds the parts."""
        return self._folder / STATE

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the finished parts, in the order in which they were saved."""
        return tuple(part.name for part in self._parts)

    def save(
        self,
        part: str,
        weights: Mapping[str, QuantizedWeight],
        records: Sequence[LayerRecord],
        replaced: Mapping[str, torch.Tensor] | None = None,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Writes one part, then the state that the next one starts from, then names both in the journal.

        Args:
            weights: the quantized layers of this part by name; may be none.
            replaced: other tensors of the checkpoint that this part changes, by their name in the file.
            state: what the work after this part needs beside the model; None if it needs nothing.

        Raises:
            MissingResourceError: the disk is full. The journal is as it was before.
        """
        changed = dict(replaced or {})
        digest = write_tensors(_part_path(self._folder, part), _part_tensors(weights, changed))
        layers = {layer: weight.scheme for layer, weight in weights.items()}
        saved = _Part(part, digest, layers, tuple(records), tuple(changed), state is not None)
        kept = self._state
        if state is not None:
            slot = _slot(0 if kept is None or kept.file != _slot(0) else 1)
            kept = _State(slot, part, write_tensors(self._folder / slot, state))
        self._write([*self._parts, saved], kept)
        before, self._state = self._state, kept
        self._parts.append(saved)
        if before is not None and before != kept:
            (self._folder / before.file).unlink(missing_ok=True)

    def load(self, layer: str) -> QuantizedWeight:
        """The weight of one layer, bit for bit as it was saved.

        Raises:
            BrokenResultError: the part file does not have the hash that the journal names.
        """
        part = next(part for part in self._parts if layer in part.layers)
        names = [f"{layer}:codes", f"{layer}:scale", f"{layer}:zero_point"]
        tensors = self._tensors(part, names)
        return QuantizedWeight(tensors[names[0]], tensors[names[1]], tensors.get(names[2]), part.layers[layer])

    def replaced(self, *, of: Callable[[str], bool] | None = None) -> Mapping[str, torch.Tensor]:
        """All tensors that the parts changed beside the quantized layers; the last change counts.

        Each is read when it is asked for, which raises as `load`.

        Args:
            of: names of the parts that count; None for all.
        """
        holders = {name: part for part in self._parts if of is None or of(part.name) for name in part.replaced}

        def read(name: str) -> torch.Tensor:
            key = f"{name}:replaced"
            return self._tensors(holders[name], [key])[key]

        return ReadLater(holders, read)

    def records(self) -> list[LayerRecord]:
        """The records of all parts, in order and exactly as they were saved."""
        return [record for part in self._parts for record in part.records]

    def state(self) -> Mapping[str, torch.Tensor] | None:
        """What was saved as state with the last part; None where it had none. Raises as `load`.

        Each tensor is read when it is asked for. The tensors are in memory of their own, aligned as torch aligns them,
        and not mapped from the file: the products of a CPU's library may depend on the alignment in the last bit.
        """
        if not self._parts or self._state is None or self._state.part != self._parts[-1].name:
            return None
        path = self._folder / self._state.file
        _check(path, self._state.sha256)
        return FileTensors(path)

    def resumed(self) -> Resumed | None:
        """What is finished already, for the step that goes on; None if nothing is. Raises as `load`."""
        if not self._parts:
            return None
        return Resumed(self.parts, tuple(self.records()), self.load, self.state(), self.replaced())

    @contextmanager
    def worthless_after(self, *errors: type[CompressError]) -> Iterator[None]:
        """Errors after which going on would end in the same error: the journal is forgotten, nothing is resumed."""
        try:
            yield
        except errors:
            forget(self._folder)
            raise

    def _tensors(self, part: _Part, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Those of the named tensors that the part has."""
        from safetensors import safe_open

        path = _part_path(self._folder, part.name)
        if self._checked.get(path) != stamp(path):  # once, for the writing and for the proof
            _check(path, part.sha256)
            self._checked[path] = stamp(path)
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            return {name: file.get_tensor(name) for name in names if name in there}

    def _write(self, parts: Sequence[_Part], state: _State | None) -> None:
        listing = {
            "version": _VERSION,
            "fingerprint": self._fingerprint,
            "parts": [self._entry(part) for part in parts],
            "state": None if state is None else asdict(state),
        }
        write_bytes(self._folder / LISTING, json.dumps(listing | {"sha256": _listing_sha256(listing)}).encode())

    def _entry(self, part: _Part) -> dict[str, Any]:
        """A part as JSON, made once: hundreds of them are written again after each."""
        return self._listed.get(part.name) or self._listed.setdefault(part.name, asdict(part))

    def _clear_unnamed(self) -> None:
        """Removes what a kill left half written, and what was dropped."""
        named = {_part_path(self._folder, part.name) for part in self._parts}
        named |= set() if self._state is None else {self._folder / self._state.file}
        _make_folders(self._folder)
        for folder in (self._folder / PARTS, self._folder / STATE):
            for path in folder.iterdir():
                if path in named:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def finished(folder: Path) -> tuple[str, ...]:
    """Names of the parts that a journal in `folder` lists, unverified; none where there is no readable journal."""
    listing = _read(folder)
    return () if listing is None else tuple(part.name for part in listing["parts"])


def forget(folder: Path) -> None:
    """Makes what a journal in `folder` lists worthless: nothing is finished any more."""
    (folder / LISTING).unlink(missing_ok=True)


def counted(parts: Sequence[str]) -> str:
    """`12 finished blocks`; what is not done block by block is done layer by layer. See `AHEAD`."""
    blocks = bool(parts) and all(name.startswith("block-") for name in parts)
    noun = "block" if blocks else "part" if any(name.startswith(AHEAD) for name in parts) else "layer"
    return f"{len(parts)} finished {noun}{'' if len(parts) == 1 else 's'}"


def _part_tensors(
    weights: Mapping[str, QuantizedWeight], replaced: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    tensors = {f"{name}:replaced": tensor for name, tensor in replaced.items()}
    for layer, weight in weights.items():
        tensors[f"{layer}:codes"] = weight.codes
        tensors[f"{layer}:scale"] = weight.scale
        if weight.zero_point is not None:
            tensors[f"{layer}:zero_point"] = weight.zero_point
    return tensors


def _part_path(folder: Path, part: str) -> Path:
    return folder / PARTS / f"{part}.safetensors"


def _slot(number: int) -> str:
    return f"{STATE}/{number}.safetensors"


def _make_folders(folder: Path) -> None:
    """Links and files in their place go: nothing is read from where a link leads, nothing is removed there."""
    for inner in (folder / PARTS, folder / STATE):
        if inner.is_symlink() or (inner.exists() and not inner.is_dir()):
            inner.unlink()
        inner.mkdir(parents=True, exist_ok=True)


def _check(path: Path, expected: str) -> None:
    if not _intact(path, expected):
        raise BrokenResultError(
            f"{path.name}: changed on disk since it was written.", hint="Start the run again without --resume."
        )


def _intact(path: Path, expected: str) -> bool:
    try:
        return sha256(path) == expected
    except OSError:
        return False


def _carries(folder: Path, state: _State | None, part: _Part) -> bool:
    return state is not None and state.part == part.name and _intact(folder / state.file, state.sha256)


def _listing_sha256(listing: Mapping[str, Any]) -> str:
    """Of a listing without its own hash: a journal that was changed is no journal."""
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> dict[str, Any] | None:
    """The listing with its parts and state as objects; None if it is missing, unreadable or of another version."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        listing = json.loads((folder / LISTING).read_bytes())
        if listing["version"] != _VERSION or listing.pop("sha256") != _listing_sha256(listing):
            return None
        state = listing["state"]
        return {
            "fingerprint": dict(listing["fingerprint"]),
            "parts": [_part(entry) for entry in listing["parts"]],
            "state": None if state is None else _State(**state),
        }
    return None


def _part(entry: Mapping[str, Any]) -> _Part:
    layers = {layer: Scheme(**scheme) for layer, scheme in entry["layers"].items()}
    records = [LayerRecord(**{key: _tuples(value) for key, value in one.items()}) for one in entry["records"]]
    fields = {**entry, "layers": layers, "records": tuple(records), "replaced": tuple(entry["replaced"])}
    return _Part(**fields)


def _tuples(value: Any) -> Any:
    """JSON has no tuples, and records have no lists."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
