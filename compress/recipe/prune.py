"""The step `prune` of a recipe."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from compress.recipe.fields import Factor, ImportanceName, KeepAmount, Multiple, Size, rule
from compress.recipe.section import Section


class Keep(Section):
    """How much of a model is kept: a share (0.75 or 75%) or a count (6)."""

    ffn: KeepAmount | None = None
    """Channels of every feed-forward network. A share becomes the nearest legal width."""
    heads: KeepAmount | None = None
    """Query heads of every attention layer."""
    kv_heads: KeepAmount | None = None
    """Key and value heads of every attention layer; each goes with all of its query heads."""
    layers: KeepAmount | None = None
    """Transformer layers."""

    @property
    def named(self) -> dict[str, int | float]:
        """What is asked for."""
        return {name: value for name, value in self if value is not None}


class Prune(Section):
    """Take feed-forward channels, attention heads or whole layers out of the model."""

    keep: Keep = Keep()
    """What is kept of each kind; what is not named stays whole."""
    params: Factor | None = None
    """In place of `keep`: search for the best shape with at most this share of the parameters, such as 0.8x."""
    size: Size | None = None
    """In place of `keep`: search for the best shape whose weight files take at most so much, such as 100MB."""
    importance: ImportanceName = "obs"
    """What decides which units go: obs (the loss of output that is left after the best compensation), magnitude
    (weights alone), activation (weights times inputs), taylor (weights times gradients) or random."""
    compensate: bool = True
    """Fit the remaining weights, so that they make up for what was removed."""
    ffn_multiple: Multiple = "auto"
    """Feed-forward widths are multiples of this. auto: 64, or 128 where int4 with groups of 128 follows."""
    max_shard_size: Size = Field(default=5 * 10**9, json_schema_extra={"default": "5GB"})
    """Largest weight file, with its unit (MB = 10^6 bytes)."""

    @property
    def searches(self) -> bool:
        """Whether the shape is to be found."""
        return self.params is not None or self.size is not None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        named = [*self.keep.named, *(name for name in ("params", "size") if getattr(self, name) is not None)]
        if not named:
            raise rule("must say what is kept, such as `keep: {ffn: 0.75}`, or `params: 0.8x`, or `size: 100MB`")
        if self.searches and len(named) > 1:
            raise rule(f"`params` and `size` search for the shape by themselves: give one of {', '.join(named)}")
        return self

    def fixed(self, **kept: Any) -> Prune:
        """The same step with a shape that was found."""
        return self.model_copy(update={"keep": Keep(**kept), "params": None, "size": None})
