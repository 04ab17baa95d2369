"""A plain folder: the source's own tensors, floating ones cast to float16 or bfloat16 if that is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compress.errors import BrokenResultError

_CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def cast_tensor(name: str, tensor: torch.Tensor, cast: str | None) -> torch.Tensor:
    """The tensor, rounded to the dtype named `cast` (None: as it is) if it is a floating one.

    Raises:
        BrokenResultError: a finite number became infinite.
    """
    if cast is None or tensor.dtype not in _CASTABLE:
        return tensor
    dtype: torch.dtype = getattr(torch, cast)
    rounded = tensor.to(dtype)
    lost = tensor.isfinite() & ~rounded.isfinite()
    if bool(lost.any()):
        raise BrokenResultError(
            f"{name}: {int(lost.sum())} numbers are too large for {cast} (the largest is "
            f"{float(tensor[lost].abs().max()):.4g}, the limit {torch.finfo(dtype).max:.4g}).",
            hint="Cast to bfloat16 (`--target bf16`), which has the range of float32.",
        )
    return rounded


def cast_config(config: Mapping[str, Any], cast: str) -> dict[str, Any]:
    """The configuration with its dtype, and that of the models nested in it, set to `cast`."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            changed[key] = cast
        elif isinstance(value, dict) and ("dtype" in value or "torch_dtype" in value):
            changed[key] = cast_config(value, cast)
        else:
            changed[key] = value
    if "dtype" not in config and "torch_dtype" not in config:
        changed["dtype"] = cast
    return changed
