"""What becomes of every linear layer: skipped, or quantized by the step's target or by one of its overrides."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.errors import UsageError
from compress.model.anatomy import Anatomy, LinearLayer
from compress.plan.fused import check_fused
from compress.recipe.quantize import Quantize
from compress.scheme import AUTO_GROUP_SIZES, FORMAT_GROUP_SIZES, PER_CHANNEL, TARGETS, Scheme, Target

_LOST = "no layer that can be quantized matches."


@dataclass(frozen=True)
class PlannedLayer:
    """One linear layer and what is to happen to it: `skipped` says why nothing is, `target` names what it becomes."""

    layer: LinearLayer
    scheme: Scheme | None
    skipped: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class _Part:
    """The layers that the step itself or one override decides about.

    Attributes:
        place: how messages name it: empty for the step of a recipe without overrides.
        asked: the group size as the recipe gives it.
        ways: what its messages call the setting: `--group-size`, or `group_size` of an override.
    """

    place: str
    target: Target
    asked: str | int | None
    ways: str
    layers: tuple[LinearLayer, ...]


@dataclass(frozen=True)
class _Misfit:
    message: str
    hint: str


def plan_layers(step: Quantize, parts: Anatomy) -> tuple[PlannedLayer, ...]:
    """Decides about every layer: `skip` first, then the last override that matches, then the step's target.

    Raises:
        UsageError: a glob without effect, group sizes that do not divide, no layer left, or a fused group with
            several schemes.
    """
    if TARGETS[step.target].cast:
        return tuple(PlannedLayer(layer, None, f"cast to {TARGETS[step.target].cast}") for layer in parts.layers)
    skipped = _skipped(step, parts)
    if len(skipped) == len(parts.layers):
        raise UsageError("skip leaves no layer to quantize.", hint="Remove globs from `skip`.")
    schemes: dict[str, Scheme] = {}
    targets: dict[str, str] = {}
    misfits = []
    fixed = FORMAT_GROUP_SIZES.get(step.format or TARGETS[step.target].formats[0])
    for part in _split(step, parts, skipped):
        size = _format_group_size(part, fixed) if fixed else _group_size(part)
        if isinstance(size, _Misfit):
            misfits.append(size)
            continue
        assert part.target.bits is not None  # casts were told above, and no override is one
        symmetric = step.symmetric or not part.target.asymmetric
        scheme = Scheme(part.target.bits, size, symmetric, part.target.activation_bits, part.target.values)
        schemes |= dict.fromkeys((layer.name for layer in part.layers), scheme)
        targets |= dict.fromkeys((layer.name for layer in part.layers), part.target.name)
    if misfits:
        hints = dict.fromkeys(misfit.hint for misfit in misfits)
        raise UsageError("\n".join(misfit.message for misfit in misfits), hint=" ".join(hints))
    check_fused(parts, schemes)
    return tuple(
        PlannedLayer(layer, schemes.get(layer.name), skipped.get(layer.name), targets.get(layer.name))
        for layer in parts.layers
    )


def matches(name: str, glob: str) -> bool:
    """A glob matches the whole module name or its last parts ("q_proj", "mlp.*")."""
    return fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name, f"*.{glob}")


def _skipped(step: Quantize, parts: Anatomy) -> dict[str, str]:
    """{layer name: reason} for the recipe's `skip`, on top of what is protected anyway."""
    protected = {parts.module_name(tensor) if "." in tensor else tensor for tensor in parts.untouched}
    reasons: dict[str, str] = {}
    lost = []
    for glob in step.skip:
        names = [layer.name for layer in parts.layers if matches(layer.name, glob)]
        reasons.update({name: f"skip: {glob}" for name in names if name not in reasons})
        if not names and not any(matches(name, glob) for name in protected):
            lost.append(glob)
    if lost:
        raise UsageError(f"skip: no layer matches {', '.join(repr(glob) for glob in lost)}.", hint=_globs(parts))
    return reasons


def _globs(parts: Anatomy) -> str:
    examples = ", ".join(dict.fromkeys(layer.name.rpartition(".")[2] for layer in parts.layers))
    return f"Globs match module names such as {parts.layers[0].name}, or their ends: {examples}."


def _split(step: Quantize, parts: Anatomy, skipped: Mapping[str, str]) -> list[_Part]:
    """The layers to quantize by who decides about them. Raises UsageError for overrides without effect."""
    owners: dict[str, int] = {}
    for index, override in enumerate(step.overrides):
        owners |= {layer.name: index for layer in parts.layers if matches(layer.name, override.layers)}
    wanted = [layer for layer in parts.layers if layer.name not in skipped]
    own = tuple(layer for layer in wanted if layer.name not in owners)
    name = f"target {step.target}" if step.overrides else ""
    split = [_Part(name, TARGETS[step.target], step.group_size, "--group-size", own)]
    for index, override in enumerate(step.overrides):
        layers = tuple(layer for layer in wanted if owners.get(layer.name) == index)
        place = f"overrides[{index}] ({override.layers})"
        split.append(_Part(place, TARGETS[override.target], override.group_size, "group_size", layers))
    idle = [_idle(part.place, step, index, parts, skipped) for index, part in enumerate(split[1:]) if not part.layers]
    if idle:
        lost = any(sentence.endswith(_LOST) for sentence in idle)
        raise UsageError("\n".join(idle), hint=_globs(parts) if lost else None)
    return [part for part in split if part.layers]


def _idle(place: str, step: Quantize, index: int, parts: Anatomy, skipped: Mapping[str, str]) -> str:
    """Why an override decides about no layer."""
    names = [layer.name for layer in parts.layers if matches(layer.name, step.overrides[index].layers)]
    if not names:
        return f"{place}: {_LOST}"
    if all(name in skipped for name in names):
        return f"{place}: skip leaves every layer alone that it matches, and skip wins: remove one of the two."
    return f"{place}: later overrides decide about every layer that it matches: move it behind them, or remove it."


def _group_size(part: _Part) -> int | _Misfit:
    default = part.target.default_group_size
    asked = default if part.asked is None or not part.target.grouped else part.asked
    if asked == "auto":
        return _auto_group_size(part)
    if not isinstance(asked, int) or asked == PER_CHANNEL:
        return PER_CHANNEL
    return _fitting_group_size(asked, part) if part.target.grouped else _fixed_group_size(asked, part)


def _format_group_size(part: _Part, sizes: Sequence[int]) -> int | _Misfit:
    """The group size of a format that has no other: what is asked must be that, or nothing, or auto."""
    size = sizes[0]
    if part.asked not in (None, "auto", *sizes):
        return _Misfit(
            f"{_lead(part)}group size {part.asked}: the format stores blocks of {size} values, each with its scale.",
            f"Leave {part.ways} out, or choose another --format.",
        )
    offenders = [layer for layer in part.layers if layer.width % size]
    if not offenders:
        return size
    return _Misfit(
        f"{_lead(part)}the format stores blocks of {size} values, and {size} does not divide the input width of "
        f"{len(offenders)} layers. They are:\n" + _offenders(offenders),
        "Leave these layers alone with skip, or choose another --format.",
    )


def _auto_group_size(part: _Part) -> int | _Misfit:
    for size in AUTO_GROUP_SIZES:
        if all(layer.width % size == 0 for layer in part.layers):
            return size
    smallest = AUTO_GROUP_SIZES[-1]
    return _Misfit(
        f"{_lead(part)}group size auto: none of {', '.join(map(str, AUTO_GROUP_SIZES))} divides the width of every "
        f"layer. {smallest} fails for:\n" + _offenders([layer for layer in part.layers if layer.width % smallest]),
        f"Use {part.ways} -1 (one scale per output channel), another size, or leave these layers alone with skip.",
    )


def _fixed_group_size(size: int, part: _Part) -> int | _Misfit:
    offenders = [layer for layer in part.layers if layer.width % size]
    if not offenders:
        return size
    return _Misfit(
        f"{_lead(part)}target {part.target.name} is stored in blocks of {size} weights, which do not divide the input "
        f"width of {len(offenders)} layers:\n" + _offenders(offenders),
        "Leave these layers alone with skip, or use another target.",
    )


def _fitting_group_size(size: int, part: _Part) -> int | _Misfit:
    offenders = [layer for layer in part.layers if layer.width % size]
    if not offenders:
        return size
    larger = any(layer.width < size for layer in offenders)
    rule = "A group larger than a layer's width is an error too. " if larger else ""
    fitting = [str(other) for other in AUTO_GROUP_SIZES if all(layer.width % other == 0 for layer in part.layers)]
    sizes = f"{part.ways} {' or '.join(fitting)}, " if fitting else ""
    return _Misfit(
        f"{_lead(part)}group size {size} does not divide the input width of {len(offenders)} layers. {rule}They are:\n"
        + _offenders(offenders),
        f"Use {sizes}{part.ways} -1 (one scale per output channel), or leave these layers alone with skip.",
    )


def _lead(part: _Part) -> str:
    return f"{part.place}: " if part.place else ""


def _offenders(layers: Sequence[LinearLayer]) -> str:
    return "\n".join(f"  {layer.name}: width {layer.width}" for layer in layers)
