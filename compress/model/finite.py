"""A look at every weight before the long part: a checkpoint with NaN or infinite values is refused at once."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from compress.errors import BrokenResultError, UsageError
from compress.model.checkpoint import Checkpoint
from compress.progress import Progress

if TYPE_CHECKING:
    import torch

SHOWN = 20


def _surely_finite(tensor: torch.Tensor) -> bool:
    """One fast pass, which NaN and infinite values reach; nothing is allocated."""
    if not tensor.numel():
        return False
    low, high = tensor.aminmax()
    return math.isfinite(float(low)) and math.isfinite(float(high))


def check_finite(checkpoint: Checkpoint, progress: Progress, *, halved: Collection[str] = ()) -> None:
    """Reads every tensor once, one in memory at a time.

    Args:
        halved: tensors that will be stored in float16.

    Raises:
        BrokenResultError: names every tensor with values that are NaN or infinite, and how many they are.
        UsageError: the same of values that float16 cannot hold.
    """
    import torch

    broken, large = [], []
    with progress.phase("Checking the weights", len(checkpoint.tensors)) as advance:
        for name in checkpoint.tensors:
            tensor = checkpoint.read(name)
            if tensor.is_floating_point() and tensor.element_size() == 1:
                tensor = tensor.float()  # torch knows NaN of 8 bits, but does not look for it
            if tensor.is_floating_point() and not _surely_finite(tensor):
                count = tensor.numel() - int(torch.isfinite(tensor).sum())
                if count:
                    broken.append(f"  {name}: {count} of {tensor.numel()} values")
                elif name in halved and not bool(tensor.half().isfinite().all()):
                    large.append(f"  {name}: up to {float(tensor.abs().max()):.3g}")
            del tensor  # before the next one comes
            advance(1)
    if broken:
        more = f"\n  ... and {len(broken) - SHOWN} more tensors" if len(broken) > SHOWN else ""
        raise BrokenResultError(
            f"{checkpoint.source}: weights are NaN or infinite:\n" + "\n".join(broken[:SHOWN]) + more,
            hint="This checkpoint is broken; nothing was written.",
        )
    if large:
        raise UsageError(
            f"{checkpoint.source}: the format stores these tensors in float16, which ends at 65504:\n"
            + "\n".join(large[:SHOWN]),
            hint="Choose another --format.",
        )
