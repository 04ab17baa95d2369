"""The dtypes of a model's weights: which are read at all, and in which one stock loaders hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.errors import UsageError
from compress.model.checkpoint import Checkpoint

READ = frozenset({"F64", "F32", "F16", "BF16"})
_BUFFERS = frozenset({"BOOL", "U8", "I16", "I32", "I64"})
"""Masks and positions, which some files carry beside the weights."""
_STATED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_LISTED = 20


def check_dtypes(checkpoint: Checkpoint) -> None:
    """Raises UsageError, listing the tensors, if some are numbers of 8 bits or fewer: another tool has rounded them."""
    lost = {name: info.dtype for name, info in checkpoint.tensors.items() if info.dtype not in READ | _BUFFERS}
    if lost:
        lines = [f"  {name}: {dtype}" for name, dtype in list(lost.items())[:_LISTED]]
        more = [f"  ... and {len(lost) - _LISTED} more"] if len(lost) > _LISTED else []
        raise UsageError(
            f"{checkpoint.source}: {len(lost)} tensors are stored as {', '.join(sorted(set(lost.values())))}; weights "
            "are read as F64, F32, F16 or BF16, and a second rounding would add its error to the first one's:\n"
            + "\n".join([*lines, *more]),
            hint="Start from the original model, or convert this one to bfloat16 with the tool that made it.",
        )


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that config.json names, as safetensors calls it; None for none, or one that is no usual weight's."""
    stated = config.get("dtype", config.get("torch_dtype"))
    return _STATED.get(stated.removeprefix("torch.")) if isinstance(stated, str) else None


def held_dtype(config: Mapping[str, Any], stored: str) -> str:
    """The dtype in which a plain `from_pretrained` holds a weight that the file has as `stored`.

    It casts to what config.json says. A scale that is written in that dtype is not rounded again on the way; where
    config.json says float32, no dtype is.
    """
    stated = stated_dtype(config)
    return stored if stated in (None, "F32") or stored not in READ else str(stated)


def dtype_note(checkpoint: Checkpoint) -> str | None:
    """What to know where config.json states another dtype than the matrices of the file have."""
    stated = stated_dtype(checkpoint.config)
    matrices = {info.dtype for info in checkpoint.tensors.values() if len(info.shape) >= 2 and info.dtype in READ}
    others = sorted(matrices - {stated})
    if stated is None or not others:
        return None
    return (
        f"config.json says {stated}, the weights are stored as {', '.join(others)}: both are kept, and stock loaders "
        f"compute in {stated} unless they are told otherwise"
    )
