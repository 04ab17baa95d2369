"""What a recipe would do to a checkpoint, told from config and safetensors headers alone: no weights, no torch.

Everything that can be known to go wrong is said here, all offenders at once, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compress.errors import UsageError
from compress.formats.layout import scale_dtype, stored_tensors
from compress.formats.stored import Shard, shard_layout
from compress.model.anatomy import HEAD, Anatomy, anatomy, is_weight
from compress.model.checkpoint import Checkpoint
from compress.plan.asked import check_asked
from compress.plan.layers import PlannedLayer, plan_layers
from compress.plan.tasks import PlannedTask, plan_tasks
from compress.recipe.schema import Recipe
from compress.scheme import TARGETS, Scheme, Target


@dataclass(frozen=True)
class Plan:
    """Attributes:
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
    shards: tuple[Shard, ...]
    tasks: tuple[PlannedTask, ...] = ()

    @property
    def calibrates(self) -> bool:
        """Whether calibration text goes through the model."""
        return self.algorithm == "gptq" or self.recipe.steps[0].quantize.smooths_any

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
    def split_groups(self) -> tuple[str, ...]:
        """Groups of layers that serving engines fuse into one matrix and of which only a part is quantized."""
        fates: dict[str, set[Scheme | None]] = {}
        for planned in self.layers:
            fates.setdefault(planned.layer.fused, set()).add(planned.scheme)
        return tuple(name for name, found in fates.items() if len(found) > 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight files, headers included."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def parameters(self) -> int:
        """Weights that the model computes with; a tied tensor counts once."""
        return sum(
            _size(info.shape)
            for name, info in self.checkpoint.tensors.items()
            if is_weight(info) and not (name == HEAD and self.anatomy.tied)
        )

    @property
    def quantized_parameters(self) -> int:
        return sum(planned.layer.parameters for planned in self.quantized)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of everything stored for the weights of the quantized layers."""
        stems = {planned.layer.tensor.removesuffix("weight") for planned in self.quantized}
        return sum(
            tensor.nbytes
            for shard in self.shards
            for tensor in shard.tensors
            if tensor.name.rpartition(".")[0] + "." in stems and not tensor.name.endswith(".bias")
        )


def make_plan(recipe: Recipe, checkpoint: Checkpoint) -> Plan:
    """Resolves a recipe against a checkpoint.

    Raises:
        UsageError: unknown model type, target and format that do not fit the architecture, group sizes that do not
            divide, a glob that matches nothing, overrides that split a fused group, an input that is quantized
            already.
    """
    step = recipe.steps[0].quantize
    target = TARGETS[step.target]
    _check_dense(checkpoint)
    parts = anatomy(checkpoint)
    format_name = step.format or target.formats[0]
    _check_format(parts, target, format_name)
    layers = plan_layers(step, parts)
    schemes = {planned.layer.name: planned.scheme for planned in layers if planned.scheme is not None}
    _check_mix(parts, format_name, schemes)
    check_asked(recipe, parts.kind, checkpoint.positions, cast=target.cast)
    tensors = stored_tensors(format_name, checkpoint.tensors, parts.layers, schemes, cast=target.cast)
    return Plan(
        recipe=recipe,
        checkpoint=checkpoint,
        anatomy=parts,
        output=Path(recipe.output).expanduser() if recipe.output else default_output(recipe.model, target.name),
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
        shards=shard_layout(tensors, step.max_shard_size),
        tasks=plan_tasks(recipe, parts.kind),
    )


def default_output(model: str, target: str) -> Path:
    """`./<model name>-<target>`."""
    folder = Path(model).expanduser()
    name = folder.resolve().name if folder.exists() else model.rpartition("/")[2].partition("@")[0]
    return Path(f"{name}-{target}")


def _size(shape: Sequence[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _check_dense(checkpoint: Checkpoint) -> None:
    if checkpoint.is_quantized:
        block = checkpoint.config.get("quantization_config") or {}
        method = block.get("quant_method", "unknown method") if isinstance(block, Mapping) else "unknown method"
        raise UsageError(
            f"{checkpoint.source}: the model is quantized already ({method}); a second rounding would add its error "
            "to the first one's.",
            hint="Start from the original model.",
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
    if format_name == "gptq" and parts.kind == "encoder" and len(set(schemes.values())) > 1:
        raise UsageError(
            "overrides: nothing loads an encoder in the gptq format with several schemes. transformers reads it "
            "through optimum, which gives all layers one scheme; GPTQModel and vLLM read decoders only.",
            hint="Use --format compressed-tensors, or one scheme for all layers.",
        )
