"""How a model is pruned: what the walk over its blocks can be told, and how much text is read. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


FISHER_TOKENS = 8192
"""Tokens behind each Fisher matrix: for widths up to a few thousand, a ranking needs no more."""
TAYLOR_TOKENS = 16384
MOMENT_TOKENS = 16384
"""Tokens behind the moments that a search over shapes takes, at most."""
COMPARED_TOKENS = 2048
"""Held-out tokens that go through every shape, and through every model without some layer, that is compared."""
RETRIED = 12
"""Layers that are tried again after one has gone: those that added least when they were tried last."""


def held_out(count: int, share: float) -> tuple[int, ...]:
    """Which of `count` windows decide instead of being fitted to: at least one, spread evenly."""
    held = min(count, max(1, round(count * share)))
    return tuple((2 * number + 1) * count // (2 * held) for number in range(held))


@dataclass(frozen=True)
class PruneSettings:
    """What is not known from theory and was chosen on held-out text has its candidates here.

    Attributes:
        importance: obs, magnitude, activation, taylor or random.
        compensate: fit the remaining weights.
        seed: of the importance `random`.
        compute_dtype: in which the blocks run.
        batch_size: windows on the way together where not all are.
        one_pass: all windows stop together; without it a few at a time come anew to every layer that is fitted.
        spill: folder in which the windows wait in front of a block, where memory does not hold them; None for memory.
        held_out: share of the windows, one at least, on which candidates are compared and errors measured.
        ridges: candidates of a: the fit of the remaining columns adds a mean(diag C) to the diagonal of C.
        selection_ridge: the same while units are chosen.
        drift_ridges: candidates of the ridge with which the drift of earlier blocks is corrected.
        residual_shares: candidates of rho, the share of the residual's drift that is corrected.
        steps: in about so many steps channels go, those of one step together.
        swaps: rounds in which kept and removed units are exchanged, at most.
    """

    importance: str
    compensate: bool
    compute_dtype: torch.dtype
    device: str
    seed: int = 0
    batch_size: int = 1
    one_pass: bool = True
    spill: Path | None = None
    held_out: float = 0.1
    ridges: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    selection_ridge: float = 1e-2
    drift_ridges: tuple[float, ...] = (0.05, 0.2, 0.5, 2.0)
    residual_shares: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
    steps: int = 48
    swaps: int = 20
