"""`compress.json`: what a result was made from, and every file in it.

No time stamps and no output path: the same run gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress import __version__
from compress.records import StepRecord
from compress.report.build import plain
from compress.report.environment import versions

SCHEMA_VERSION = 1


def provenance(
    *,
    stage: Path,
    recipe: Mapping[str, Any],
    model: Mapping[str, Any],
    steps: Sequence[StepRecord],
    threads: int,
    compute_dtype: str,
) -> dict[str, Any]:
    """The content of `compress.json` for a staged folder.

    Args:
        recipe: resolved; its output folder is left out, as the same run into another folder gives the same bytes.
        model: source as the user wrote it, revision, content hash.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "compress": __version__,
        "model": plain(model),
        "recipe": plain({key: value for key, value in recipe.items() if key != "output"}),
        "versions": versions(),
        "threads": threads,
        "compute_dtype": compute_dtype,
        "steps": [_step(step) for step in steps],
        "files": file_hashes(stage),
    }


def file_hashes(folder: Path) -> dict[str, str]:
    """{relative name: SHA-256} of every file in a folder."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _step(step: StepRecord) -> dict[str, Any]:
    """A step with its totals; what was not applicable to a layer is left out."""
    layers = [
        {key: value for key, value in asdict(layer).items() if value is not None and value != ()}
        for layer in step.layers
    ]
    return {
        "kind": step.kind,
        "settings": plain(step.settings),
        "calibration": plain(step.calibration),
        "layers_quantized": step.layers_quantized,
        "layers_skipped": step.layers_skipped,
        "layers_fallback": step.layers_fallback,
        "layers_uncalibrated": step.layers_uncalibrated,
        "notes": list(step.notes),
        "replaced": plain(step.replaced),
        "layers": plain(layers),
    }
