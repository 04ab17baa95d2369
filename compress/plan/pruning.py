"""What the step `prune` would do to a checkpoint, told from config and headers."""

from __future__ import annotations

from dataclasses import dataclass

from compress.formats.stored import Shard
from compress.model.anatomy import Anatomy
from compress.model.checkpoint import Checkpoint
from compress.model.shapes import Shape
from compress.recipe.prune import Prune
from compress.recipe.schema import Recipe


@dataclass(frozen=True)
class PrunePlan:
    """Attributes:
    source, anatomy: the model that is pruned.
    before: its shape.
    candidates: the shapes that come into question, the largest first; exactly one where the recipe names it, and
        otherwise what `params` or `size` let the search choose from.
    checkpoint: the pruned model of the first candidate as its headers will be (`has_weights` is False).
    shards: its weight files, with their exact sizes.
    notes: what a reader should know: a share that was rounded, another model type, limits in serving.
    """

    step: Prune
    source: Checkpoint
    anatomy: Anatomy
    before: Shape
    candidates: tuple[Shape, ...]
    checkpoint: Checkpoint
    shards: tuple[Shard, ...]
    notes: tuple[str, ...] = ()

    @property
    def after(self) -> Shape:
        """The shape to build."""
        return self.candidates[0]

    @property
    def calibrates(self) -> bool:
        """Whether text goes through the model."""
        return self.step.compensate or self.step.importance not in ("magnitude", "random") or self.step.searches


def plan_pruning(recipe: Recipe, checkpoint: Checkpoint, parts: Anatomy) -> PrunePlan:
    """Resolves the step `prune` of a recipe against a dense checkpoint.

    Raises:
        UsageError: a shape that the model cannot have, with the nearest ones that it can.
    """
    raise NotImplementedError
