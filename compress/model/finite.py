"""A look at every weight before the long part: a checkpoint with NaN or infinite values is refused at once."""

from __future__ import annotations

from compress.errors import BrokenResultError
from compress.model.checkpoint import Checkpoint
from compress.progress import Progress

SHOWN = 20


def check_finite(checkpoint: Checkpoint, progress: Progress) -> None:
    """Reads every tensor once, one in memory at a time.

    Raises:
        BrokenResultError: names every tensor with values that are NaN or infinite, and how many they are.
    """
    import torch

    broken = []
    with progress.phase("Checking the weights", len(checkpoint.tensors)) as advance:
        for name in checkpoint.tensors:
            tensor = checkpoint.read(name)
            if tensor.is_floating_point():
                count = tensor.numel() - int(torch.isfinite(tensor).sum())
                if count:
                    broken.append(f"  {name}: {count} of {tensor.numel()} values")
            advance(1)
    if broken:
        more = f"\n  ... and {len(broken) - SHOWN} more tensors" if len(broken) > SHOWN else ""
        raise BrokenResultError(
            f"{checkpoint.source}: weights are NaN or infinite:\n" + "\n".join(broken[:SHOWN]) + more,
            hint="This checkpoint is broken; nothing was written.",
        )
