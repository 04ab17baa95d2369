"""The best of several shapes: the one whose answers on held-out text stay nearest to the original's.

Every candidate is pruned in one shot. One pass over the original gives the moments of the inputs of every output
projection; from those come the units that stay (for channels one order of removal serves all widths) and the weights
that make up for the others; then the whole model, its removed columns zero and its removed layers left out, answers
held-out windows. The walk that builds the shape afterwards corrects drift and chooses ridges by layer, so its result is
better than what is seen here; the order of the candidates is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.errors import BrokenResultError
from compress.model.anatomy import Anatomy, LinearLayer
from compress.model.blocks import replaced
from compress.model.checkpoint import Checkpoint
from compress.model.prunable import output_of, shape_of
from compress.model.pruned import pruned_checkpoint
from compress.model.shapes import Shape
from compress.progress import Progress
from compress.prune.compensate import compensated, damped, ridge
from compress.prune.depth import compared_positions, depth_order, distance_of, shortened
from compress.prune.gradients import Gradients, leading
from compress.prune.importance import greedy, in_metric
from compress.prune.importance import whole as all_columns
from compress.prune.settings import COMPARED_TOKENS, MOMENT_TOKENS, PruneSettings
from compress.prune.statistics import POST_NORM, token_weights
from compress.prune.units import Evidence, Units, channels, chosen, heads
from compress.prune.whole import WholeModel, output_projections


@dataclass(frozen=True)
class Tried:
    """One candidate.

    Attributes:
        parameters, bytes: of all its tensors, tied ones once.
        divergence: mean distance of its answers from the original's; see `Found.metric`.
        layers_kept: the layers of the original that it has.
    """

    shape: Shape
    parameters: int
    bytes: int
    divergence: float
    layers_kept: tuple[int, ...]

    def row(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self.shape), "parameters": self.parameters, "bytes": self.bytes, "divergence": self.divergence}


@dataclass(frozen=True)
class Found:
    """Attributes:
    best: the candidate with the smallest divergence; of equal ones the first.
    tried: all, in the order in which they were given.
    metric: "kl", KL(original || candidate) in nats per token, or "1 - cosine" of an encoder's token states.
    """

    best: Tried
    tried: tuple[Tried, ...]
    metric: str


def search_shapes(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    candidates: Sequence[Shape],
    windows: Sequence[torch.Tensor],
    held_out: Sequence[torch.Tensor],
    settings: PruneSettings,
    gradients: Gradients | None,
    progress: Progress,
) -> Found:
    """Tries every candidate.

    Args:
        windows, held_out: ids, int64 [T] each; the first are fitted to, the second judge.
        gradients: of the original; None where there are none. `taylor` needs them.

    Raises:
        BrokenResultError: the model's inputs of projections, or its answers, are not finite.
    """
    before = shape_of(checkpoint, anatomy)
    judged = shortened(held_out, COMPARED_TOKENS)
    fewest = min(shape.layers for shape in candidates)
    order = depth_order(
        checkpoint,
        anatomy,
        judged,
        progress,
        layers=fewest,
        importance=settings.importance,
        seed=settings.seed,
        device=settings.device,
    )
    trial = _Trial(checkpoint, anatomy, before, settings, gradients)
    trial.read(windows, progress)
    trial.choose(candidates, progress)
    answers = [trial.answer(ids) for ids in judged]
    tried = []
    with progress.phase("Trying shapes", len(candidates)) as advance:
        for shape in candidates:
            kept = order.kept(shape.layers)
            with trial.pruned(shape, kept):
                distances = [
                    distance_of(anatomy)(original, trial.answer(ids))
                    for original, ids in zip(answers, judged, strict=True)
                ]
            tried.append(_row(checkpoint, anatomy, shape, kept, float(torch.cat(distances).mean())))
            advance(1)
    best = min(tried, key=lambda one: one.divergence)
    return Found(best, tuple(tried), "kl" if anatomy.kind == "decoder" else "1 - cosine")


def _row(checkpoint: Checkpoint, anatomy: Anatomy, shape: Shape, kept: tuple[int, ...], divergence: float) -> Tried:
    if not math.isfinite(divergence):
        raise BrokenResultError(
            f"{checkpoint.source}: answers of the original or of a pruned model are not finite, so no shape can be "
            "found by them.",
            hint="Name the shape, such as --keep-ffn 0.75.",
        )
    tensors = pruned_checkpoint(checkpoint, anatomy, shape, kept).tensors.values()
    return Tried(
        shape=shape,
        parameters=sum(math.prod(info.shape) for info in tensors),
        bytes=sum(info.nbytes for info in tensors),
        divergence=divergence,
        layers_kept=kept,
    )


@dataclass
class _Moments:
    """Sums over tokens of inputs x of a projection, with weights w: w x x^T float32 [in, in], w x float64 [in], w."""

    square: torch.Tensor
    total: torch.Tensor
    weight: float = 0.0

    def add(self, x: torch.Tensor, w: torch.Tensor) -> None:
        """x float32 [T, in], w float32 [T]."""
        weighted = x * w.unsqueeze(1)
        self.square.addmm_(x.T, weighted)
        self.total += weighted.sum(dim=0, dtype=torch.float64)
        self.weight += float(w.sum(dtype=torch.float64))

    @property
    def mean(self) -> torch.Tensor:
        return self.total / (self.weight or 1.0)

    def covariance(self, *, centred: bool) -> torch.Tensor:
        """float64 [in, in]."""
        C = self.square.double() / (self.weight or 1.0)
        C = (C + C.T) / 2
        return C - torch.outer(self.mean, self.mean) if centred else C


class _Trial:
    """The original in memory, with what is needed to prune it to any of the candidates and back.

    Attributes:
        there: bool [in] by projection and `Units`: the columns that stay.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        anatomy: Anatomy,
        before: Shape,
        settings: PruneSettings,
        gradients: Gradients | None,
    ) -> None:
        self._whole = WholeModel(checkpoint, anatomy, device=settings.device)
        self._anatomy, self._before, self._gradients = anatomy, before, gradients or Gradients()
        self._settings = replace(settings, swaps=0)  # the same for all candidates, and a matter of the last percents
        self._moments: dict[str, _Moments] = {}
        self.there: dict[tuple[str, Units], torch.Tensor] = {}

    def answer(self, ids: torch.Tensor) -> torch.Tensor:
        """See `WholeModel.answer`."""
        with torch.no_grad():
            return self._whole.answer(ids, compared_positions(len(ids)))

    def read(self, windows: Sequence[torch.Tensor], progress: Progress) -> None:
        """Takes the moments of the original; none where nothing depends on text."""
        if not self._settings.compensate and self._settings.importance in ("magnitude", "random", "taylor"):
            return
        handles = []
        for layer in output_projections(self._anatomy):
            square = torch.zeros(layer.width, layer.width, device=self._settings.device)
            moments = _Moments(square, square.new_zeros(layer.width, dtype=torch.float64))
            self._moments[layer.name] = moments
            module = self._whole.projection(layer)
            handles.append(module.register_forward_hook(partial(_seen, self._anatomy, layer, moments)))
        some = leading(windows, MOMENT_TOKENS)
        with torch.no_grad(), progress.phase("Reading calibration text", len(some)) as advance:
            for ids in some:
                self._whole.base(ids)
                advance(1)
        for handle in handles:
            handle.remove()
        for name, moments in self._moments.items():
            if not bool(moments.total.isfinite().all() and moments.square.isfinite().all()):
                raise BrokenResultError(f"{name}: its inputs on calibration text are not finite.")

    def choose(self, candidates: Sequence[Shape], progress: Progress) -> None:
        """Decides for every projection which units stay in each of the candidates."""
        widths = sorted({channels(self._before, shape) for shape in candidates}, key=lambda units: -units.keep)
        attention = list(dict.fromkeys(heads(self._before, shape) for shape in candidates))
        with progress.phase("Choosing units", self._anatomy.depth) as advance:
            for block in range(self._anatomy.depth):
                self._choose(output_of(self._anatomy, block, "ffn"), [one for one in widths if not one.all_stay])
                self._choose(output_of(self._anatomy, block, "heads"), [one for one in attention if not one.all_stay])
                advance(1)

    def _choose(self, layer: LinearLayer, all_units: Sequence[Units]) -> None:
        if not all_units:
            return
        name, W = layer.name, self._weight(layer)
        C = self._covariance(layer) if name in self._moments else None
        evidence = Evidence(C, self._gradients.fisher.get(name), self._gradients.taylor.get(name))
        if self._settings.importance == "obs" and all_units[0].unit == "ffn":
            found = _nested(W, evidence, all_units, self._settings)
        else:
            found = [chosen(name, W, W, evidence, units, self._settings) for units in all_units]
        for units, there in zip(all_units, found, strict=True):
            self.there[name, units] = there.repeat_interleave(layer.width // units.of)

    @contextmanager
    def pruned(self, shape: Shape, kept_layers: Sequence[int]) -> Iterator[None]:
        """The model as a candidate, for a while."""
        gone = set(range(self._anatomy.depth)) - set(kept_layers)
        before: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
        try:
            for block in kept_layers:
                for units in (channels(self._before, shape), heads(self._before, shape)):
                    if not units.all_stay:
                        layer = output_of(self._anatomy, block, units.unit)
                        module = self._whole.projection(layer)
                        before.append((module, {name: value.clone() for name, value in module.state_dict().items()}))
                        self._prune(layer, module, self.there[layer.name, units])
            with replaced(self._whole.blocks, self._whole.without(gone)):
                yield
        finally:
            for module, state in before:
                module.load_state_dict(state)

    @torch.no_grad()
    def _prune(self, layer: LinearLayer, module: nn.Module, there: torch.Tensor) -> None:
        W = self._weight(layer)
        changed = W.masked_fill(~there, 0.0)
        if self._settings.compensate:
            C = self._covariance(layer)
            changed = compensated(W, C, there, ridge(C, self._settings.selection_ridge))
            if layer.bias is not None:
                _parameter(module, "bias").add_((W - changed) @ self._moments[layer.name].mean)
        _parameter(module, "weight").copy_(changed.T if layer.transposed else changed)

    def _weight(self, layer: LinearLayer) -> torch.Tensor:
        """float64 [out, in]."""
        W = _parameter(self._whole.projection(layer), "weight").double()
        return W.T if layer.transposed else W

    def _covariance(self, layer: LinearLayer) -> torch.Tensor:
        return self._moments[layer.name].covariance(centred=layer.bias is not None)


def _seen(
    anatomy: Anatomy,
    layer: LinearLayer,
    moments: _Moments,
    _module: nn.Module,
    args: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> None:
    x, y = args[0].reshape(-1, layer.width), output.reshape(-1, layer.out)
    moments.add(x, token_weights(y) if anatomy.model_type in POST_NORM else x.new_ones(len(x)))


def _parameter(module: nn.Module, name: str) -> torch.Tensor:
    parameter = getattr(module, name)
    assert isinstance(parameter, torch.Tensor)
    return parameter


def _nested(
    W: torch.Tensor, evidence: Evidence, widths: Sequence[Units], settings: PruneSettings
) -> list[torch.Tensor]:
    """bool [units.of] for every width, the largest first: what stays at one of them is among what does at the next."""
    assert evidence.C is not None
    W = W.masked_fill(evidence.C.diagonal() <= 0, 0.0)
    weighted = W if evidence.fisher is None else in_metric(W, evidence.fisher.to(W.device))
    fit = all_columns(weighted, damped(evidence.C, ridge(evidence.C, settings.selection_ridge)), 1)
    found = []
    for units in widths:
        fit = greedy(fit, units.keep, step=max(1, units.of // settings.steps))
        found.append(fit.there)
    return found
