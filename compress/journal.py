"""The finished parts of a running job, on disk: quantized weights by layer, listed with their hashes.

A run works in `.NAME.partial` beside its output. Each block's quantized weights become one safetensors file under
`parts/`, and `journal.json` names every finished file with its SHA-256. What is in no journal does not exist; what
does not have the hash in the journal is refused. Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import BrokenResultError
from compress.scheme import QuantizedWeight, Scheme

if TYPE_CHECKING:
    import torch


class Journal:
    """Parts of one run.

    Args:
        folder: the run's `.NAME.partial`; `parts/` and `journal.json` are made in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}  # part file -> sha256
        self._layers: dict[str, str] = {}  # layer -> part file
        self._schemes: dict[str, Scheme] = {}
        (folder / "parts").mkdir(parents=True, exist_ok=True)

    def save(self, part: str, weights: Mapping[str, QuantizedWeight]) -> None:
        """Writes one part file and then names it in the journal."""
        import safetensors.torch

        tensors: dict[str, torch.Tensor] = {}
        for layer, weight in weights.items():
            tensors[f"{layer}:codes"] = weight.codes.cpu().contiguous()
            tensors[f"{layer}:scale"] = weight.scale.cpu().contiguous()
            if weight.zero_point is not None:
                tensors[f"{layer}:zero_point"] = weight.zero_point.cpu().contiguous()
            self._layers[layer] = part
            self._schemes[layer] = weight.scheme
        data = safetensors.torch.save(tensors)
        _write(self._folder / "parts" / f"{part}.safetensors", data)
        self._files[part] = hashlib.sha256(data).hexdigest()
        listing = {
            "files": self._files,
            "layers": self._layers,
            "schemes": {layer: asdict(scheme) for layer, scheme in self._schemes.items()},
        }
        _write(self._folder / "journal.json", json.dumps(listing, indent=1).encode())

    def load(self, layer: str) -> QuantizedWeight:
        """The weight of one layer, as it was saved.

        Raises:
            BrokenResultError: the part file does not have the hash that the journal names.
        """
        import safetensors

        part = self._layers[layer]
        path = self._folder / "parts" / f"{part}.safetensors"
        self._check(part, path)
        with safetensors.safe_open(path, framework="pt") as file:
            names = set(file.keys())
            zero_point = f"{layer}:zero_point"
            return QuantizedWeight(
                file.get_tensor(f"{layer}:codes"),
                file.get_tensor(f"{layer}:scale"),
                file.get_tensor(zero_point) if zero_point in names else None,
                self._schemes[layer],
            )

    def _check(self, part: str, path: Path) -> None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self._files[part]:
            raise BrokenResultError(f"{path.name}: changed on disk since it was written.", hint="Start the run again.")


def _write(path: Path, data: bytes) -> None:
    """Writes a file so that it is there whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
