"""The part of the proof that asks whether everything that was not quantized is the original's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from compress.errors import CompressError
from compress.formats import gguf_check
from compress.formats.proof import ProofCheck, stored_sha256
from compress.formats.read import Reader
from compress.model.anatomy import anatomy
from compress.model.checkpoint import Checkpoint, open_checkpoint

_LISTED = 10


def check_original(
    stage: Path, source: Path, replaced: Mapping[str, str], names: Mapping[str, str] | None = None
) -> ProofCheck:
    """Tensors with a name of the original's, other than quantized weights, against the original.

    A tensor may be left out if it is the second name of another one, and its equal.

    Args:
        replaced: {tensor name: hash of its bytes} of those that must be other than the original's.
        names: {tensor name: its name in the original} of a model that has lost tensors; None for one that has not.
    """
    if names is not None:
        return _check_remaining(stage, source, replaced, names)
    try:
        result, original = open_checkpoint(stage), open_checkpoint(source)
        if result.is_gguf:
            faults, count = gguf_check.original_faults(stage, original)
            found = f"{count} tensors equal the original's, rounded as the file stores them"
            return check_of("original", faults, found)
        quantized = {f"{name}.weight" for name in Reader(stage).quantized_names}
    except CompressError as error:
        return ProofCheck("original", False, error.message)
    kept = [name for name in result.tensors if name in original.tensors and name not in quantized | replaced.keys()]
    lost = [name for name in original.tensors if name not in result.tensors and name not in quantized]
    faults = [f"{name} is not in the folder" for name in lost if not _is_copy(name, original, kept)]
    others = [name for name in kept if not _same(result.read(name), original.read(name))]
    faults += [f"{name} differs from the original's" for name in others]
    for name in replaced:
        if name in quantized or name not in result.tensors or name not in original.tensors:
            faults.append(f"{name} was to be replaced, but it is no tensor of both folders")
        elif stored_sha256(result.read(name)) != replaced[name]:
            faults.append(f"{name} differs from what was to replace the original's")
    good = f"{len(kept)} tensors equal the original's"
    return check_of("original", faults, good + (f", {len(replaced)} what replaced them" if replaced else ""))


def _check_remaining(stage: Path, source: Path, replaced: Mapping[str, str], names: Mapping[str, str]) -> ProofCheck:
    """Every tensor of a folder whose tensors have other names in the original; which there are is for the plan."""
    try:
        result, original = open_checkpoint(stage), open_checkpoint(source)
    except CompressError as error:
        return ProofCheck("original", False, error.message)
    kept, faults = 0, [f"{name} is not in the folder" for name in replaced if name not in result.tensors]
    for name in result.tensors:
        before = names.get(name)
        if name in replaced:
            if stored_sha256(result.read(name)) != replaced[name]:
                faults.append(f"{name} differs from what was to be left of the original's {before}")
        elif before not in original.tensors or not _equal(result.read(name), original.read(str(before))):
            faults.append(f"{name} differs from the original's {before}")
        else:
            kept += 1
    return check_of("original", faults, f"{kept} tensors equal the original's, {len(replaced)} what was left of theirs")


def _equal(found: torch.Tensor, original: torch.Tensor) -> bool:
    return found.dtype == original.dtype and found.shape == original.shape and _same(found, original)


def _is_copy(name: str, original: Checkpoint, kept: Sequence[str]) -> bool:
    """Whether a tensor only repeats another one that is kept, as tied embeddings do in some files."""
    if name not in anatomy(original).second_names:
        return False
    info = original.tensors[name]
    others = (original.tensors[other] for other in kept)
    alike = [other.name for other in others if (other.dtype, other.shape) == (info.dtype, info.shape)]
    return any(_same(original.read(name), original.read(other)) for other in alike)


def _same(found: torch.Tensor, original: torch.Tensor) -> bool:
    one, other = (part.contiguous().reshape(-1).view(torch.uint8) for part in (found, original.to(found.dtype)))
    return torch.equal(one, other)


def check_of(name: str, faults: list[str], good: str) -> ProofCheck:
    more = f"; and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
    return ProofCheck(name, not faults, "; ".join(faults[:_LISTED]) + more if faults else good)
