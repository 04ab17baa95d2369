"""Which layers go, where a model is to have fewer of them.

With importance obs or taylor, one layer after the other goes: always the one without which the model's answers on
held-out windows are nearest to the original's, by KL(original || without it) of decoders and 1 - cosine of an encoder's
token states. activation takes 1 - cos(h, h') of what a layer gets and gives, the Block Influence of Men et al. 2024,
"ShortGPT", equation 1; magnitude the sum of the squares of a layer's matrices. Every order is nested: the layers that
are gone when n go are among those when n + 1 do. Of each kind of layer in the original (full or sliding attention) at
least one stays, and a first block that is built otherwise than the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from compress.divergence import token_kl
from compress.errors import UsageError
from compress.model.anatomy import Anatomy
from compress.model.blocks import BlockModel, Call, run_block
from compress.model.checkpoint import Checkpoint
from compress.model.prunable import prunable
from compress.model.pruned import layer_kinds
from compress.progress import Advance, Progress
from compress.prune.settings import COMPARED_TOKENS, RETRIED
from compress.prune.whole import WholeModel

LOGITS_OF_WINDOW = 128
"""Positions of a window, evenly spread, whose logits are compared: a small model's head costs as much as its blocks."""


@dataclass(frozen=True)
class DepthOrder:
    """Attributes:
    depth: layers of the original.
    removed: in the order in which they go.
    alone: by layer, the score of it alone; NaN for those that may not go.
    together: by step, the score of all layers that are gone after it.
    metric: what a score is: "kl", "1 - cosine", "block influence", "squared weights" or "random"; "none" where all
        layers stay.
    """

    depth: int
    removed: tuple[int, ...]
    alone: tuple[float, ...]
    together: tuple[float, ...]
    metric: str

    def kept(self, layers: int) -> tuple[int, ...]:
        """Those that stay where `layers` do, ascending.

        Raises ValueError: more layers would have to go than `removed` has.
        """
        count = self.depth - layers
        if not 0 <= count <= len(self.removed):
            raise ValueError(f"an order of {len(self.removed)} of {self.depth} layers does not say which {layers} stay")
        gone = set(self.removed[:count])
        return tuple(index for index in range(self.depth) if index not in gone)


def depth_order(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    windows: Sequence[torch.Tensor],
    progress: Progress,
    *,
    layers: int,
    importance: str,
    seed: int = 0,
    device: str = "cpu",
) -> DepthOrder:
    """The order in which layers go until `layers` are left.

    Args:
        windows: ids, int64 [T] each, of held-out calibration text; not used by magnitude and random.
        importance: obs, magnitude, activation, taylor or random.
        seed: of random.

    Raises:
        UsageError: there are more kinds of layers than `layers`.
    """
    of = _Layers(layer_kinds(checkpoint, anatomy), prunable(anatomy).first_stays)
    fewest = len(set(of.kinds))
    if layers < fewest:
        raise UsageError(
            f"{checkpoint.source}: {layers} layers cannot stay; its {anatomy.depth} layers are of {fewest} "
            "kinds, and of each at least one must.",
            hint=f"Keep at least {fewest} layers.",
        )
    count = anatomy.depth - layers
    if not count:
        return DepthOrder(anatomy.depth, (), (), (), "none")
    some = shortened(windows, COMPARED_TOKENS)
    if importance in ("obs", "taylor"):
        return _greedy(checkpoint, anatomy, some, progress, of, count, device)
    if importance == "magnitude":
        return _static(of, _squares(checkpoint, anatomy), count, "squared weights")
    if importance == "activation":
        return _static(of, _influences(checkpoint, anatomy, some, progress, device), count, "block influence")
    generator = torch.Generator().manual_seed(seed)
    return _static(of, torch.rand(anatomy.depth, generator=generator).tolist(), count, "random")


def shortened(windows: Sequence[torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """The first windows that have `tokens` tokens together, the last one cut to fit."""
    found, left = list[torch.Tensor](), tokens
    for ids in windows:
        if left < 2:
            break
        found.append(ids[:left])
        left -= len(found[-1])
    return found


def _static(layers: _Layers, scores: Sequence[float], count: int, metric: str) -> DepthOrder:
    """The order by scores that do not depend on what has gone."""
    removed: list[int] = []
    for _ in range(count):
        removed.append(min(layers.removable(removed), key=lambda layer: (scores[layer], layer)))
    together = tuple(scores[layer] for layer in removed)
    return DepthOrder(len(layers.kinds), tuple(removed), tuple(scores), together, metric)


@dataclass(frozen=True)
class _Layers:
    """Attributes:
    kinds: of every layer.
    first_stays: layer 0 is built otherwise than the rest.
    """

    kinds: Sequence[Hashable]
    first_stays: bool = False

    def removable(self, removed: Sequence[int]) -> list[int]:
        """The layers that stand, may go, and are not the last of their kind."""
        standing = [layer for layer in range(len(self.kinds)) if layer not in removed]
        left = Counter(self.kinds[layer] for layer in standing)
        return [layer for layer in standing[int(self.first_stays) :] if left[self.kinds[layer]] > 1]


def _squares(checkpoint: Checkpoint, anatomy: Anatomy) -> list[float]:
    totals = [0.0] * anatomy.depth
    for layer in anatomy.layers:
        totals[layer.block] += float(checkpoint.read(layer.tensor).double().pow(2).sum())
    return totals


@torch.no_grad()
def _influences(
    checkpoint: Checkpoint, anatomy: Anatomy, windows: Sequence[torch.Tensor], progress: Progress, device: str
) -> list[float]:
    model = BlockModel(checkpoint, anatomy, dtype=torch.float32, device=device)
    entered = [model.inputs(ids) for ids in windows]
    states, found = [hidden for hidden, _ in entered], []
    with progress.phase("Comparing layers", anatomy.depth) as advance:
        for index in range(anatomy.depth):
            with model.block(index) as block:
                outputs = [run_block(block, h, calls[index]) for h, (_, calls) in zip(states, entered, strict=True)]
            cosines = [torch.cosine_similarity(h, o, dim=-1).flatten() for h, o in zip(states, outputs, strict=True)]
            found.append(float(1 - torch.cat(cosines).double().mean()))
            states = outputs
            advance(1)
    return found


@torch.no_grad()
def _greedy(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    windows: Sequence[torch.Tensor],
    progress: Progress,
    layers: _Layers,
    count: int,
    device: str,
) -> DepthOrder:
    tried = _Tried(WholeModel(checkpoint, anatomy, device=device), anatomy, windows)
    alone, removed, together = [float("nan")] * anatomy.depth, list[int](), list[float]()
    added: dict[int, float] = {}  # what a layer added to the divergence when it was tried last
    first = layers.removable(())
    with progress.phase("Leaving layers out", len(first) + (count - 1) * min(RETRIED, len(first))) as advance:
        for step in range(count):
            here = layers.removable(removed)
            if step:
                here = sorted(sorted(here, key=lambda layer: (added[layer], layer))[:RETRIED])
            scores = tried.scores(here, advance)
            before = together[-1] if together else 0.0
            added |= {layer: score - before for layer, score in scores.items()}
            if not step:
                alone = [scores.get(layer, float("nan")) for layer in range(anatomy.depth)]
            best = min(here, key=lambda layer: (scores[layer], layer))
            removed.append(best)
            together.append(scores[best])
            tried.remove(best)
    metric = "kl" if anatomy.kind == "decoder" else "1 - cosine"
    return DepthOrder(anatomy.depth, tuple(removed), tuple(alone), tuple(together), metric)


class _Tried:
    """The layers that still stand, with what every window has in front of each of them."""

    def __init__(self, whole: WholeModel, anatomy: Anatomy, windows: Sequence[torch.Tensor]) -> None:
        self._whole, self._windows = whole, windows
        self._distance = distance_of(anatomy)
        self._standing = list(range(anatomy.depth))
        self._positions = [compared_positions(len(ids)) for ids in windows]
        self._calls: list[list[Call]] = []
        self._fronts: list[dict[int, torch.Tensor]] = []
        self._original: list[torch.Tensor] = []
        for ids, positions in zip(windows, self._positions, strict=True):
            hidden, calls = whole.enter(ids)
            fronts: dict[int, torch.Tensor] = {}
            last = self._run(hidden, calls, 0, fronts)
            self._calls.append(calls)
            self._fronts.append(fronts)
            self._original.append(whole.leave(ids, last, positions))

    def scores(self, layers: Sequence[int], advance: Advance) -> dict[int, float]:
        """By layer, the mean distance from the original's answers if it goes beside those that are gone."""
        found = {}
        for layer in layers:
            distances = []
            for window, ids in enumerate(self._windows):
                last = self._run(self._fronts[window][layer], self._calls[window], layer + 1)
                answers = self._whole.leave(ids, last, self._positions[window])
                distances.append(self._distance(self._original[window], answers))
            found[layer] = float(torch.cat(distances).mean())
            advance(1)
        return found

    def remove(self, layer: int) -> None:
        self._standing.remove(layer)
        for calls, fronts in zip(self._calls, self._fronts, strict=True):
            self._run(fronts.pop(layer), calls, layer + 1, fronts)

    def _run(
        self, hidden: torch.Tensor, calls: Sequence[Call], first: int, fronts: dict[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Through the standing layers from `first` on; `fronts` takes what is in front of each."""
        for layer in self._standing:
            if layer >= first:
                if fronts is not None:
                    fronts[layer] = hidden
                hidden = run_block(self._whole.blocks[layer], hidden, calls[layer])
        return hidden


def distance_of(anatomy: Anatomy) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """How far two models' answers are apart, float64 [P]: KL in nats of decoders, 1 - cosine of encoders' states."""
    return token_kl if anatomy.kind == "decoder" else _away


def _away(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return 1 - torch.cosine_similarity(one.double(), other.double(), dim=-1)


def compared_positions(length: int) -> torch.Tensor:
    """At most LOGITS_OF_WINDOW positions of a window, evenly spread, int64, the last one among them."""
    count = min(length, LOGITS_OF_WINDOW)
    return (torch.arange(1, count + 1) * length) // count - 1
