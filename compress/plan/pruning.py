"""What the step `prune` would do to a checkpoint, told from config and headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import ceil, lcm

from compress.formats.layout import stored_tensors
from compress.formats.stored import Shard, shard_layout
from compress.model.anatomy import Anatomy, LinearLayer
from compress.model.checkpoint import Checkpoint
from compress.model.prunable import output_of, shape_of
from compress.model.pruned import becomes_mistral, pruned_checkpoint
from compress.model.shapes import Shape
from compress.plan.kept_shape import Legal, legal_shapes, resolve
from compress.plan.shape_candidates import bytes_of, candidates, costs_of, parameters_of, smallest
from compress.prune.settings import PruneSettings, held_out
from compress.recipe.origin import Fault
from compress.recipe.prune import Prune
from compress.recipe.quantize import Quantize
from compress.recipe.schema import Recipe
from compress.scheme import AUTO_GROUP_SIZES, FORMAT_GROUP_SIZES, TARGETS

_MULTIPLE = 64
_MANY = 0.4
"""Share of parameters outside of the layers from which on a note says so."""


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
    step = recipe.prune
    assert step is not None
    before = shape_of(checkpoint, parts)
    faults: list[Fault] = []
    multiple = _auto_multiple(recipe, parts, before) if step.ffn_multiple == "auto" else step.ffn_multiple
    legal = legal_shapes(checkpoint, parts, before, multiple)
    notes: tuple[str, ...] = ()
    if step.searches:
        chosen, wrong = _searched(step, checkpoint, parts, legal)
    else:
        asked = resolve(step.keep, legal)
        chosen, wrong, notes = (asked.shape,), asked.faults, asked.notes
    path = recipe.step_path("prune")
    faults += [((*path, *inside), sentence) for inside, sentence in wrong]
    if not wrong:
        faults += _too_little_text(recipe, parts, before, chosen[0])
    if faults:
        raise recipe.error(faults)
    pruned, shards = _laid_out(step, checkpoint, parts, chosen[0])
    told = (*notes, *_notes(checkpoint, parts, before, chosen[0]))
    return PrunePlan(step, checkpoint, parts, before, chosen, pruned, shards, told)


def with_shape(plan: PrunePlan, shapes: Sequence[Shape], kept_layers: Sequence[int] | None = None) -> PrunePlan:
    """The same plan with other candidates, the first to be built.

    Args:
        kept_layers: indices of the layers that stay, ascending, where that is known: config.json depends on it.
    """
    told = _notes(plan.source, plan.anatomy, plan.before, plan.after)
    notes = [note for note in plan.notes if note not in told]
    notes += _notes(plan.source, plan.anatomy, plan.before, shapes[0])
    pruned, shards = _laid_out(plan.step, plan.source, plan.anatomy, shapes[0], kept_layers)
    return replace(plan, candidates=tuple(shapes), checkpoint=pruned, shards=shards, notes=tuple(notes))


def _laid_out(
    step: Prune, source: Checkpoint, parts: Anatomy, after: Shape, kept_layers: Sequence[int] | None = None
) -> tuple[Checkpoint, tuple[Shard, ...]]:
    """The pruned model and its weight files, to the byte."""
    pruned = pruned_checkpoint(source, parts, after, kept_layers)
    shards = shard_layout(stored_tensors("safetensors", pruned.tensors, (), {}), step.max_shard_size)
    file_of = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    tensors = {name: replace(info, shard=file_of[name]) for name, info in pruned.tensors.items()}
    return replace(pruned, tensors=tensors, shard_bytes={one.file: one.nbytes for one in shards}), shards


def _auto_multiple(recipe: Recipe, parts: Anatomy, before: Shape) -> int:
    """64, or more where the groups of a step that follows need it; less for widths that 64 leaves no choice."""
    group = _group_size(recipe.quantize, parts.layers)
    choices = [lcm(_MULTIPLE >> halved, group) for halved in range(_MULTIPLE.bit_length())]
    fitting = [choice for choice in choices if before.ffn % choice == 0]
    return next((choice for choice in fitting if 4 * choice <= before.ffn or choice == group), min(fitting, default=1))


def _group_size(step: Quantize | None, layers: Sequence[LinearLayer]) -> int:
    """A number that the groups of a step need all widths to be a multiple of."""
    if step is None:
        return 1
    needed = 1
    asked = [(step.target, step.group_size), *((one.target, one.group_size) for one in step.overrides)]
    fixed = FORMAT_GROUP_SIZES.get(step.format or TARGETS[step.target].formats[0])
    for target, stated in ((TARGETS[name], stated) for name, stated in asked):
        if not target.grouped:
            continue
        size = target.default_group_size if stated is None else stated
        if fixed:
            size = fixed[0]
        elif not isinstance(size, int):
            fitting = (one for one in AUTO_GROUP_SIZES if all(layer.width % one == 0 for layer in layers))
            size = next(fitting, 1)
        needed = lcm(needed, max(int(size), 1))
    return needed


def _searched(
    step: Prune, source: Checkpoint, parts: Anatomy, legal: Legal
) -> tuple[tuple[Shape, ...], tuple[Fault, ...]]:
    """The candidates for `params` or `size`, or what is wrong with the budget."""
    if step.size is None:
        costs = costs_of(source, parts, legal.before, parameters_of)
        budget = int(Decimal(repr(step.params)) * costs.of(legal.before))
        found = candidates(legal, costs, budget)
        least = costs.of(smallest(legal)) / costs.of(legal.before)
        reason = f"the smallest shape that this model can have holds {ceil(least * 1000) / 1000:g}x of its parameters"
        return found, () if found else ((("params",), reason),)
    if source.weight_bytes <= step.size:
        reason = f"the weight files take {_megabytes(source.weight_bytes)} already: nothing would be removed"
        return (), ((("size",), reason),)

    def files(shape: Shape) -> int:
        return sum(one.nbytes for one in _laid_out(step, source, parts, shape)[1])

    costs = costs_of(source, parts, legal.before, bytes_of)
    headers = files(legal.before) - costs.of(legal.before)  # a pruned model's are no longer
    found = tuple(one for one in candidates(legal, costs, step.size - headers) if files(one) <= step.size)
    reason = (
        f"the weight files of the smallest shape that this model can have take {_megabytes(files(smallest(legal)))}"
    )
    return found, () if found else ((("size",), reason),)


def _megabytes(size: int) -> str:
    """Rounded up, so that a budget of this size can be met."""
    return f"{ceil(size / 10**4) / 100:.2f}MB"


def _too_little_text(recipe: Recipe, parts: Anatomy, before: Shape, after: Shape) -> list[Fault]:
    """A fault if fewer tokens are asked for than a layer that is fitted to them has columns left.

    Layers that lose nothing are fitted, too, to make up for what earlier ones have lost.
    """
    step = recipe.prune
    assert step is not None
    if not step.compensate and step.importance != "obs":
        return []
    heads, ffn = output_of(parts, 0, "heads"), output_of(parts, 0, "ffn")
    width, name = max((heads.width // before.heads * after.heads, heads.name), (after.ffn, ffn.name))
    text = recipe.calibration
    fitted = text.samples - len(held_out(text.samples, PruneSettings.held_out))
    tokens = fitted * text.length
    if tokens >= width:
        return []
    sentence = (
        f"{text.samples} windows of {text.length} tokens leave {tokens} tokens beside what is held out, fewer than the "
        f"{width} input columns of {name} that stay and are fitted to them: more samples (`--samples`) or a larger "
        "length (`--length`), or no compensation (`--no-compensate`) and another importance than obs"
    )
    return [(("calibration", "samples"), sentence)]


def _notes(source: Checkpoint, parts: Anatomy, before: Shape, after: Shape) -> list[str]:
    """What a reader should know of a shape."""
    notes = []
    if after.heads != before.heads:
        if becomes_mistral(source, parts, after.heads):
            notes.append(
                f"written as model type mistral: LlamaConfig refuses {after.heads} query heads, which do not divide "
                "the hidden size, and transformers' Mistral classes compute the same without a sliding window"
            )
        if parts.model_type == "qwen2":
            notes.append(
                "vLLM's own qwen2 code takes the size of a head from the hidden size and not from head_dim, and so "
                "cannot serve fewer heads (its transformers backend can): keep all heads if that matters"
            )
        notes.append(
            f"tensor parallelism: vLLM splits {after.heads} query heads over a number of GPUs that divides it, and "
            f"{after.kv_heads} key and value heads over one that divides that or is a multiple of it"
        )
    costs = costs_of(source, parts, before, parameters_of)
    outside = costs.all / costs.of(before)
    if outside > _MANY:
        notes.append(
            f"{outside:.0%} of the parameters are outside of the layers (embeddings, most of all): pruning leaves them"
        )
    return notes
