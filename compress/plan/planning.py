"""What a recipe would do to a checkpoint, told from config and safetensors headers alone: no weights, no torch.

Everything that can be known to go wrong is said here, all offenders at once, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from compress.errors import UsageError
from compress.formats.gguf_layout import GgufFile, check_supported, gguf_file
from compress.formats.layout import layer_tensors, scale_dtype, stored_tensors
from compress.formats.quantized_source import check_dense
from compress.formats.stored import WeightFile, shard_layout
from compress.model.anatomy import Anatomy, anatomy, class_names, is_weight
from compress.model.checkpoint import Checkpoint
from compress.model.dtypes import check_dtypes
from compress.plan.asked import check_asked
from compress.plan.experts import check_experts
from compress.plan.found import fitted
from compress.plan.layers import PlannedLayer, plan_layers
from compress.plan.pruning import PrunePlan, plan_pruning
from compress.plan.storages import check_storages
from compress.plan.tasks import PlannedTask, plan_tasks
from compress.recipe.quantize import Quantize
from compress.recipe.schema import Recipe
from compress.scheme import TARGETS, UNCHANGED, Scheme, Target


@dataclass(frozen=True)
class Plan:
    """Attributes:
    checkpoint, anatomy: the model that is quantized: the recipe's, or what the step `prune` makes of it.
    pruned: the step before, if there is one.
    target, algorithm, format_name: what is applied, defaults resolved; algorithm is None for casts. Overrides give
        some of the `layers` another target.
    cast: dtype name for casts, else None.
    scale_dtypes: {layer name: safetensors dtype of its scales}.
    shards: every weight file with its exact size.
    """

    recipe: Recipe
    checkpoint: Checkpoint
    anatomy: Anatomy
    output: Path
    target: Target
    algorithm: Literal["gptq", "rtn"] | None
    format_name: str
    cast: str | None
    layers: tuple[PlannedLayer, ...]
    scale_dtypes: Mapping[str, str]
    shards: tuple[WeightFile, ...]
    tasks: tuple[PlannedTask, ...] = ()
    pruned: PrunePlan | None = None

    @property
    def original(self) -> Checkpoint:
        """The model that the recipe names."""
        return self.checkpoint if self.pruned is None else self.pruned.source

    @property
    def quantizes(self) -> bool:
        """Whether anything is done after pruning: layers are quantized, or all tensors cast."""
        return self.recipe.quantize is not None

    @property
    def fits_codes(self) -> bool:
        """Whether calibration text goes through the model to quantize it."""
        step = self.recipe.quantize
        return self.algorithm == "gptq" or (step is not None and step.smooths_any)

    @property
    def calibrates(self) -> bool:
        """Whether calibration text goes through the model."""
        return self.fits_codes or (self.pruned is not None and self.pruned.calibrates)

    @property
    def class_name(self) -> str | None:
        """The class that config.json names first."""
        return next(iter(class_names(self.checkpoint.config)), None)

    @property
    def quantized(self) -> tuple[PlannedLayer, ...]:
        return tuple(planned for planned in self.layers if planned.scheme is not None)

    @property
    def schemes(self) -> dict[str, Scheme]:
        return {planned.layer.name: planned.scheme for planned in self.layers if planned.scheme is not None}

    @property
    def mixed(self) -> bool:
        """Whether the quantized layers have several schemes."""
        return len(set(self.schemes.values())) > 1

    @property
    def zero_points(self) -> bool:
        """Whether some of the layers have zero points."""
        return not all(scheme.symmetric for scheme in self.schemes.values())

    @property
    def split_groups(self) -> tuple[str, ...]:
        """Groups of layers that serving engines fuse into one matrix and of which only a part is quantized."""
        fates: dict[str, set[Scheme | None]] = {}
        for planned in self.layers:
            fates.setdefault(planned.layer.served, set()).add(planned.scheme)
        return tuple(name for name, found in fates.items() if len(found) > 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight files, headers included."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def halved(self) -> frozenset[str]:
        """Tensors of the checkpoint that a GGUF file stores in float16."""
        files = [shard for shard in self.shards if isinstance(shard, GgufFile)]
        pairs = [pair for file in files for pair in zip(file.tensors, file.sources, strict=True)]
        return frozenset(name for tensor, name in pairs if name is not None and tensor.dtype == "F16")

    @property
    def parameters(self) -> int:
        """Weights that the model computes with; a tied tensor counts once."""
        return parameters_of(self.checkpoint, self.anatomy)

    @property
    def original_parameters(self) -> int:
        """As `parameters`, of the recipe's model."""
        return self.parameters if self.pruned is None else parameters_of(self.pruned.source, self.pruned.anatomy)

    @property
    def quantized_parameters(self) -> int:
        return sum(planned.layer.parameters for planned in self.quantized)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of everything stored for the weights of the quantized layers."""
        return sum(
            tensor.nbytes
            for planned in self.quantized
            if planned.scheme is not None
            for tensor in layer_tensors(self.format_name, planned.layer, planned.scheme)
        )


def make_plan(recipe: Recipe, checkpoint: Checkpoint) -> Plan:
    """Resolves a recipe against a checkpoint.

    Raises:
        UsageError: shapes that the model cannot have, unknown model type, target and format that do not fit the
            architecture, group sizes that do not divide, a glob that matches nothing, overrides that split a fused
            group, an input that is quantized already.
    """
    checkpoint = check_dense(checkpoint, dequantize=recipe.dequantize)
    check_dtypes(checkpoint)
    parts = anatomy(checkpoint)
    asked, recipe = recipe, fitted(recipe, parts)
    pruned = None if recipe.prune is None else plan_pruning(recipe, checkpoint, parts)
    if pruned is not None:
        checkpoint = pruned.checkpoint
        parts = anatomy(checkpoint)
    return _planned(recipe, asked, checkpoint, parts, pruned)


def on_shape(plan: Plan, pruned: PrunePlan) -> Plan:
    """The same plan for the shape that was chosen in its step `prune`. Raises UsageError as `make_plan`."""
    return _planned(plan.recipe, plan.recipe, pruned.checkpoint, anatomy(pruned.checkpoint), pruned)


def _planned(recipe: Recipe, asked: Recipe, checkpoint: Checkpoint, parts: Anatomy, pruned: PrunePlan | None) -> Plan:
    """The plan from where the model to be quantized is known; `asked` is the recipe before `fitted`."""
    if recipe.quantize is None:
        assert pruned is not None  # a recipe has a step
        check_asked(asked, parts.kind, checkpoint.positions)
        return _unquantized(recipe, pruned, parts)
    step = recipe.quantize
    target = TARGETS[step.target]
    format_name = step.format or target.formats[0]
    _check_format(parts, target, format_name)
    if format_name == "gguf":
        check_supported(checkpoint.model_type, checkpoint.config)
    layers = plan_layers(step, parts)
    schemes = {planned.layer.name: planned.scheme for planned in layers if planned.scheme is not None}
    _check_mix(parts, format_name, schemes)
    check_experts(parts, format_name, layers)
    check_storages(parts, target, format_name, schemes.values())
    # As asked: gates on what `fitted` leaves out are faults.
    check_asked(asked, parts.kind, checkpoint.positions, cast=target.cast)
    shards = _weight_files(step, checkpoint, parts, format_name, schemes)
    return Plan(
        recipe=recipe,
        checkpoint=checkpoint,
        anatomy=parts,
        output=_output(recipe, target.name if pruned is None else f"pruned-{target.name}"),
        target=target,
        algorithm=step.used_algorithm,
        format_name=format_name,
        cast=target.cast,
        layers=layers,
        scale_dtypes={
            planned.layer.name: scale_dtype(format_name, planned.layer.dtype)
            for planned in layers
            if planned.scheme is not None
        },
        shards=shards,
        tasks=plan_tasks(recipe, parts.kind),
        pruned=pruned,
    )


def _unquantized(recipe: Recipe, pruned: PrunePlan, parts: Anatomy) -> Plan:
    """The plan of a recipe that only prunes."""
    return Plan(
        recipe=recipe,
        checkpoint=pruned.checkpoint,
        anatomy=parts,
        output=_output(recipe, "pruned"),
        target=UNCHANGED,
        algorithm=None,
        format_name=UNCHANGED.formats[0],
        cast=None,
        layers=tuple(PlannedLayer(layer, None, "not quantized") for layer in parts.layers),
        scale_dtypes={},
        shards=pruned.shards,
        tasks=plan_tasks(recipe, parts.kind),
        pruned=pruned,
    )


def _output(recipe: Recipe, what: str) -> Path:
    return Path(recipe.output).expanduser() if recipe.output else default_output(recipe.model, what)


def _weight_files(
    step: Quantize, checkpoint: Checkpoint, parts: Anatomy, format_name: str, schemes: Mapping[str, Scheme]
) -> tuple[WeightFile, ...]:
    """Every weight file of the output, to the byte."""
    if format_name == "gguf":
        return (gguf_file(checkpoint, parts, schemes),)
    once = {name: info for name, info in checkpoint.tensors.items() if name not in parts.second_names}
    tensors = stored_tensors(format_name, once, parts.layers, schemes, cast=TARGETS[step.target].cast)
    return shard_layout(tensors, step.max_shard_size)


def default_output(model: str, target: str) -> Path:
    """`./<model name>-<target>`."""
    folder = Path(model).expanduser()
    name = folder.resolve().name if folder.exists() else model.rpartition("/")[2].partition("@")[0]
    return Path(f"{name}-{target}")


def parameters_of(checkpoint: Checkpoint, parts: Anatomy) -> int:
    """Weights that a model computes with; a tied tensor counts once."""
    return sum(
        prod(info.shape)
        for name, info in checkpoint.tensors.items()
        if is_weight(info) and name not in parts.second_names
    )


def _check_format(parts: Anatomy, target: Target, format_name: str) -> None:
    if format_name == "compressed-tensors" and parts.architecture.transposed:
        others = [name for name in target.formats if name != format_name]
        ways = (
            f"--format {others[0]}" if others else "--target int8-weight --format gptq or --target int4 --format gptq"
        )
        raise UsageError(
            f"{parts.model_type} cannot be written as compressed-tensors: its linear layers are transformers' Conv1D, "
            "and the format holds Linear and Embedding layers only.",
            hint=f"Use {ways}.",
        )


def _check_mix(parts: Anatomy, format_name: str, schemes: Mapping[str, Scheme]) -> None:
    if format_name == "bitsandbytes" and len(set(schemes.values())) > 1:
        raise UsageError(
            "overrides: a bitsandbytes folder holds either nf4 or int8-bnb layers. Its config.json has one setting for "
            "all of them, and transformers loads every layer by it.",
            hint="Use one target, and skip for layers that are to stay as they are.",
        )
    found = set(schemes.values())
    if parts.kind == "decoder" or len(found) == 1:
        return
    if format_name == "compressed-tensors" and not all(scheme.symmetric for scheme in found):
        raise UsageError(
            "overrides: nothing loads an encoder in the compressed-tensors format with zero points beside another "
            "scheme. transformers would give all layers the first one; vLLM reads decoders only.",
            hint="Use --symmetric, or one scheme for all layers.",
        )
    if format_name in ("gptq", "gptq_v2"):
        raise UsageError(
            "overrides: nothing loads an encoder in the gptq format with several schemes. transformers reads it "
            "through optimum, which gives all layers one scheme; GPTQModel and vLLM read decoders only.",
            hint="Use --format compressed-tensors, or one scheme for all layers.",
        )
