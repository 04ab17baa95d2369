"""What is chosen for the whole model before it is pruned block by block, and kept in the journal.

Gradients tell how much an error matters; a search over shapes, where one is asked for, and an order of the layers tell
what is built. Each is a part of the journal, so that a run that is resumed has the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from compress.journal import AHEAD, Journal
from compress.model.shapes import Shape
from compress.pipeline.job import Job
from compress.plan.pruning import PrunePlan

if TYPE_CHECKING:
    import torch

    from compress.prune.gradients import Gradients
    from compress.prune.settings import PruneSettings

_GRADIENTS, _SHAPE = f"{AHEAD}gradients", f"{AHEAD}shape"
_JSON = "json"


@dataclass(frozen=True)
class Choice:
    """Attributes:
    shape, layers: what is built, and the layers of the original that stay, ascending.
    gradients: None where the importance needs none, or memory does not hold them.
    facts: what the search and the order of the layers found, for the record of the step.
    """

    shape: Shape
    layers: tuple[int, ...]
    gradients: Gradients | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def choose(job: Job, journal: Journal, settings: PruneSettings, ids: Sequence[torch.Tensor]) -> Choice:
    """What the journal has, or what is found now and saved there.

    Args:
        ids: calibration windows, int64 [T] each; empty where no text is used.

    Raises:
        BrokenResultError: see `collect_gradients`, `search_shapes`, `depth_order`.
    """
    planned = job.plan.pruned
    assert planned is not None
    gradients = _gradients(job, planned, journal, ids)
    if _SHAPE not in journal.parts:
        found = _found(job, planned, settings, gradients, ids)
        journal.save(_SHAPE, {}, (), {_JSON: _as_tensor(found)})
    found = _from_tensor(journal.replaced(of=lambda part: part == _SHAPE)[_JSON])
    wanted = planned.step.importance == "obs" and bool(ids)
    notes = (_NO_GRADIENTS,) if wanted and gradients is None else ()
    return Choice(Shape(**found["shape"]), tuple(found["layers"]), gradients, found["facts"], notes)


_NO_GRADIENTS = (
    "memory does not hold the whole model with its gradients: all directions of an output count the same in the scores"
)


def _gradients(job: Job, planned: PrunePlan, journal: Journal, ids: Sequence[torch.Tensor]) -> Gradients | None:
    from compress.prune.gradients import Gradients, collect_gradients

    importance = planned.step.importance
    if not ids or importance not in ("obs", "taylor") or not job.gradients:
        return None
    if _GRADIENTS not in journal.parts:
        found = collect_gradients(
            planned.source,
            planned.anatomy,
            ids,
            job.progress,
            fisher=importance == "obs",
            taylor=importance == "taylor",
            seed=job.recipe.seed,
            device=job.device,
        )
        journal.save(_GRADIENTS, {}, (), found.to_tensors())
    return Gradients.from_tensors(journal.replaced(of=lambda part: part == _GRADIENTS))


def _found(
    job: Job,
    planned: PrunePlan,
    settings: PruneSettings,
    gradients: Gradients | None,
    ids: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Shape, layers and facts, as JSON."""
    from compress.prune.settings import held_out

    held = held_out(len(ids), settings.held_out)
    judged = [ids[number] for number in held]
    fitted = [one for number, one in enumerate(ids) if number not in held] or judged
    if planned.step.searches:
        return _searched(job, planned, settings, gradients, fitted, judged)
    shape = planned.after
    every = range(planned.before.layers)
    if shape.layers == planned.before.layers:
        return {"shape": asdict(shape), "layers": list(every), "facts": {}}
    from compress.prune.depth import depth_order

    order = depth_order(
        planned.source,
        planned.anatomy,
        judged,
        job.progress,
        layers=shape.layers,
        importance=settings.importance,
        seed=settings.seed,
        device=settings.device,
    )
    facts = {"layers_order": {"metric": order.metric, "removed": order.removed, "scores": order.together}}
    return {"shape": asdict(shape), "layers": order.kept(shape.layers), "facts": facts}


def _searched(
    job: Job,
    planned: PrunePlan,
    settings: PruneSettings,
    gradients: Gradients | None,
    fitted: Sequence[torch.Tensor],
    judged: Sequence[torch.Tensor],
) -> dict[str, Any]:
    from compress.prune.search import search_shapes

    found = search_shapes(
        planned.source,
        planned.anatomy,
        planned.candidates,
        fitted,
        judged,
        settings,
        gradients,
        job.progress,
    )
    facts = {"search": [one.row() for one in found.tried], "search_metric": found.metric}
    return {"shape": asdict(found.best.shape), "layers": found.best.layers_kept, "facts": facts}


def _as_tensor(found: Mapping[str, Any]) -> torch.Tensor:
    """JSON as bytes, which the journal keeps beside tensors."""
    import torch

    return torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8)


def _from_tensor(stored: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(stored.tolist()))
    return found
