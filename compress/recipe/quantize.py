"""The step `quantize` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, ValidationError, ValidationInfo, field_validator

from compress.recipe.fields import (
    AlgorithmName,
    FormatName,
    GroupSize,
    QuantizedName,
    Share,
    Size,
    TargetName,
    Text,
    Texts,
    Whole,
    located,
    rule,
)
from compress.recipe.section import Section
from compress.scheme import PER_CHANNEL, TARGETS, Target, Values

DEFAULT_DAMPING = 0.05
DEFAULT_MAX_FALLBACK = 0.05


SYMMETRIC_FORMATS = {
    "gptq": "cannot store a zero point of 0 (it keeps zero - 1): use `format: gptq_v2`, or compressed-tensors",
    "gguf": "holds symmetric codes here (Q4_0, Q8_0): leave this out",
}
"""Formats without zero points, and why."""
_ONLY_GPTQ = {
    "damping": "uses damping",
    "gptq": "has these switches",
    "max_fallback": "can fall back",
    "refine": "is refined",
}
"""Fields that only algorithm gptq may change, and what it does with them."""


_UNSMOOTHED: Mapping[Values, str] = {
    "float": "stores floating-point numbers, which are as exact beside outliers as without them",
    "nf4": "is rounded as bitsandbytes does it",
    "llm_int8": "is rounded as bitsandbytes does it, which sets outliers apart",
}
"""Why factors are not folded for targets that are no integers."""


class Override(Section):
    """Another target for some of the layers."""

    layers: Text
    """Glob of layer names, as in `skip`. Skipped layers stay skipped; of several overrides the last one counts."""
    target: QuantizedName
    """What their weights become."""
    group_size: GroupSize = None
    """Input columns that share a scale, as in the step. Null: the target's own."""

    @field_validator("group_size")
    @classmethod
    def _groups_of_target(cls, size: str | int | None, info: ValidationInfo) -> str | int | None:
        return _grouped(size, _target(info))


class Gptq(Section):
    """What gptq does beyond the published algorithm; each idea can be switched off."""

    activation_order: bool = True
    """Round the columns that see the largest inputs first, instead of from left to right."""
    search_scales: bool = True
    """Search each group's scale; without it the largest weight decides."""
    asymmetric: bool = True
    """Correct what earlier layers have lost, by a second stream of activations through the original model."""
    asymmetric_damping: float = Field(default=0.5, ge=0)
    """Share of the mean Hessian diagonal that keeps this correction from following the noise of few tokens."""
    refit_scales: bool = True
    """Solve for the scales again once the codes are chosen."""
    local_search: Whole = 2
    """Passes over the codes that lower the error code by code; 0 for none."""


class Quantize(Section):
    """Store the weights of the linear layers in fewer bits."""

    target: TargetName
    """What the weights become."""
    algorithm: AlgorithmName | None = None
    """How codes are chosen: gptq or rtn (round to nearest). Null: the target's own, or gptq if an override's is."""
    format: FormatName | None = None
    """How the checkpoint is written. Null: the target's first."""
    group_size: GroupSize = None
    """Input columns that share a scale; -1 is one scale per output channel; auto is the largest of 128, 64
    and 32 that divides the width of every layer. Null: the target's own."""
    symmetric: bool = True
    """Codes centred on zero. With false every group has a zero point too (int4 and int8-weight)."""
    skip: Texts = ()
    """Globs of layer names that stay unquantized, besides embeddings, tied heads, norms and routers."""
    overrides: Annotated[tuple[Override, ...], Strict(False)] = ()
    """Layers that become something else than the target. Later entries win over earlier ones, `skip` over all."""
    damping: float = Field(default=DEFAULT_DAMPING, ge=0, lt=1)
    """Share of the mean Hessian diagonal that gptq adds to it."""
    gptq: Gptq = Gptq()
    """What gptq does beyond the published algorithm."""
    max_fallback: Share = DEFAULT_MAX_FALLBACK
    """Largest share of the layers, such as 5% or 0.05, that may fall back from gptq to round-to-nearest."""
    refine: Whole = 0
    """Steps of block-wise learning after gptq."""
    smooth: bool | None = None
    """Fold factors into norms and earlier layers, so that the rest rounds better (SmoothQuant, AWQ). Null: only where
    inputs are rounded to integers, as in int8, and what takes the factors has no bias: biases keep their
    values; nowhere with refine. Never for fp8, nf4 and int8-bnb."""
    max_shard_size: Size = Field(default=5 * 10**9, json_schema_extra={"default": "5GB"})
    """Largest weight file, with its unit (MB = 10^6 bytes)."""

    @property
    def used_algorithm(self) -> Literal["gptq", "rtn"] | None:
        """The algorithm of all layers, the default resolved; None for a cast."""
        return _algorithm(TARGETS[self.target], self.algorithm, self.overrides)

    def smooths(self, activation_bits: int | None, values: Values) -> bool:
        """Whether factors are folded for layers whose inputs are rounded to so many bits, the default resolved.

        Args:
            values: what their codes stand for. Only integers gain by it: floating-point numbers have room for
                outliers, and bitsandbytes sets them apart.
        """
        if values != "int":
            return False
        return (activation_bits is not None and not self.refine) if self.smooth is None else self.smooth

    @property
    def smooths_any(self) -> bool:
        """The same for any of the layers."""
        targets = [TARGETS[name] for name in (self.target, *(override.target for override in self.overrides))]
        return any(target.bits and self.smooths(target.activation_bits, target.values) for target in targets)

    @field_validator("algorithm")
    @classmethod
    def _no_algorithm_for_casts(cls, algorithm: str | None, info: ValidationInfo) -> str | None:
        target = _target(info)
        if algorithm and target and target.cast:
            raise rule(f"target {target.name} is a cast and uses no algorithm: leave this out")
        if algorithm and target and algorithm not in target.algorithms:
            fitting = ", ".join(row.name for row in TARGETS.values() if row.bits and algorithm in row.algorithms)
            raise rule(f"target {target.name} is only rounded to nearest. Targets of {algorithm}: {fitting}")
        return algorithm

    @field_validator("format")
    @classmethod
    def _format_of_target(cls, name: str | None, info: ValidationInfo) -> str | None:
        target = _target(info)
        if name and target and name not in target.formats:
            table = "; ".join(f"{row.name}: {', '.join(row.formats)}" for row in TARGETS.values())
            raise rule(f"target {target.name} cannot be written as {name}. Formats by target: {table}")
        return name

    @field_validator("group_size")
    @classmethod
    def _groups_of_target(cls, size: str | int | None, info: ValidationInfo) -> str | int | None:
        return _grouped(size, _target(info))

    @field_validator("symmetric")
    @classmethod
    def _zero_points(cls, symmetric: bool, info: ValidationInfo) -> bool:
        target, chosen = _target(info), info.data.get("format")
        if symmetric or target is None:
            return symmetric
        if not target.asymmetric:
            having = ", ".join(row.name for row in TARGETS.values() if row.asymmetric)
            raise rule(f"target {target.name} has no zero points: leave this out. Targets with them: {having}")
        if chosen in SYMMETRIC_FORMATS:
            raise rule(f"format {chosen} {SYMMETRIC_FORMATS[chosen]}")
        return symmetric

    @field_validator("skip")
    @classmethod
    def _no_skip_for_casts(cls, globs: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        target = _target(info)
        if globs and target and target.cast:
            raise rule(f"target {target.name} is a cast of every tensor and skips none: leave this out")
        return globs

    @field_validator("overrides")
    @classmethod
    def _one_format_for_all(cls, overrides: tuple[Override, ...], info: ValidationInfo) -> tuple[Override, ...]:
        target = _target(info)
        if overrides and target and target.cast:
            raise rule(f"target {target.name} is a cast of every tensor and has no overrides: leave this out")
        if target is None or "format" not in info.data:
            return overrides
        chosen = info.data["format"] or target.formats[0]
        faults = [
            located(rule(_other_format(override.target, chosen, target)), (index, "target"), override.target)
            for index, override in enumerate(overrides)
            if chosen not in TARGETS[override.target].formats
        ]
        if faults:
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return overrides

    @field_validator(*_ONLY_GPTQ)
    @classmethod
    def _of_gptq(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        if value != cls.model_fields[name].default:
            _check_gptq(_ONLY_GPTQ[name], info)
        return value

    @field_validator("smooth")
    @classmethod
    def _smooth_or_refine(cls, smooth: bool | None, info: ValidationInfo) -> bool | None:
        target = _target(info)
        if smooth and target and target.cast:
            raise rule(f"target {target.name} is a cast and rounds nothing: leave this out")
        others = [TARGETS[override.target] for override in info.data.get("overrides", ())]
        if smooth and target and all(one.values != "int" for one in (target, *others)):
            raise rule(f"target {target.name} {_UNSMOOTHED[target.values]}: leave this out")
        if smooth and info.data.get("format") == "gguf":
            raise rule("a GGUF file stores what takes the factors in other dtypes, which is not proved: leave this out")
        if smooth and info.data.get("refine"):
            raise rule("a step either smooths or refines: leave one of them out")
        return smooth


def _target(info: ValidationInfo) -> Target | None:
    """The target that the same map names, if it is a valid one."""
    return TARGETS.get(info.data.get("target", ""))


def _grouped(size: str | int | None, target: Target | None) -> str | int | None:
    own = target.default_group_size if target else None
    if target and not target.grouped and size not in (None, "auto", own):
        one = "has one scale per output channel" if own == PER_CHANNEL else f"has blocks of {own} weights"
        why = "is a cast and has no scales" if target.cast else one
        grouped = ", ".join(row.name for row in TARGETS.values() if row.grouped)
        raise rule(f"target {target.name} {why}: leave this out. Targets with groups: {grouped}")
    return size


def _other_format(name: str, chosen: str, target: Target) -> str:
    shared = [other for other in target.formats if other in TARGETS[name].formats]
    fitting = ", ".join(row.name for row in TARGETS.values() if row.bits and chosen in row.formats)
    ways = [f"`format: {other}`" for other in shared] + [f"another target here ({fitting})"]
    return f"target {name} cannot be written as {chosen}, which holds all layers: use {' or '.join(ways)}"


def _algorithm(
    target: Target, asked: Literal["gptq", "rtn"] | None, overrides: Sequence[Override]
) -> Literal["gptq", "rtn"] | None:
    """All layers share one algorithm: what was asked, else gptq as soon as one of the targets defaults to it."""
    defaults = [target.default_algorithm, *(TARGETS[override.target].default_algorithm for override in overrides)]
    return asked or ("gptq" if "gptq" in defaults else target.default_algorithm)


def _check_gptq(verb: str, info: ValidationInfo) -> None:
    """Raises unless the step's algorithm is gptq, or cannot be known because other values are wrong."""
    target = _target(info)
    if target is None or not {"algorithm", "overrides"} <= info.data.keys():
        return
    algorithm = _algorithm(target, info.data["algorithm"], info.data["overrides"])
    if algorithm != "gptq":
        how = f"algorithm {algorithm}" if algorithm else "a cast"
        raise rule(f"only algorithm gptq {verb}, and target {target.name} here is {how}: leave this out")
