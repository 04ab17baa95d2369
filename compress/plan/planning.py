"""What a recipe would do to a checkpoint, told from config and safetensors headers alone: no weights, no torch.

Everything that can be known to go wrong is said here, all offenders at once, before anything is loaded.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compress.errors import UsageError
from compress.formats.layout import Shard, scale_dtype, shard_layout, stored_tensors
from compress.model.anatomy import HEAD, Anatomy, LinearLayer, anatomy, is_weight
from compress.model.checkpoint import Checkpoint
from compress.recipe.schema import Quantize, Recipe
from compress.scheme import AUTO_GROUP_SIZES, PER_CHANNEL, TARGETS, Scheme, Target


@dataclass(frozen=True)
class PlannedLayer:
    """One linear layer and what is to happen to it; `skipped` says why nothing is."""

    layer: LinearLayer
    scheme: Scheme | None
    skipped: str | None = None


@dataclass(frozen=True)
class Plan:
    """Attributes:
    target, algorithm, format_name: what is applied, defaults resolved; algorithm is None for casts.
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

    @property
    def quantized(self) -> tuple[PlannedLayer, ...]:
        return tuple(planned for planned in self.layers if planned.scheme is not None)

    @property
    def schemes(self) -> dict[str, Scheme]:
        return {planned.layer.name: planned.scheme for planned in self.layers if planned.scheme is not None}

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
            divide, a glob that matches nothing, an input that is quantized already.
    """
    step = recipe.steps[0].quantize
    target = TARGETS[step.target]
    _check_dense(checkpoint)
    parts = anatomy(checkpoint)
    format_name = step.format or target.formats[0]
    _check_format(parts, target, format_name)
    _check_gates(recipe, parts, target)
    skipped = _skipped(step, parts)
    wanted = [layer for layer in parts.layers if layer.name not in skipped] if target.bits else []
    scheme = _scheme(step, target, wanted)
    layers = tuple(_planned(layer, scheme, skipped, target) for layer in parts.layers)
    schemes = {planned.layer.name: planned.scheme for planned in layers if planned.scheme is not None}
    _check_positions(recipe, parts, checkpoint)
    if target.bits and not schemes:
        raise UsageError("skip leaves no layer to quantize.", hint="Remove globs from `skip`.")
    tensors = stored_tensors(format_name, checkpoint.tensors, parts.layers, schemes, cast=target.cast)
    return Plan(
        recipe=recipe,
        checkpoint=checkpoint,
        anatomy=parts,
        output=Path(recipe.output).expanduser() if recipe.output else default_output(recipe.model, target.name),
        target=target,
        algorithm=step.algorithm or target.default_algorithm,
        format_name=format_name,
        cast=target.cast,
        layers=layers,
        scale_dtypes={name: scale_dtype(format_name, layer.dtype) for name, layer in _named(wanted).items()},
        shards=shard_layout(tensors, step.max_shard_size),
    )


def default_output(model: str, target: str) -> Path:
    """`./<model name>-<target>`."""
    name = Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model
    return Path(f"{name.rpartition('/')[2].partition('@')[0]}-{target}")


def _named(layers: Sequence[LinearLayer]) -> dict[str, LinearLayer]:
    return {layer.name: layer for layer in layers}


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


_DECODERS_ONLY = ("kl.", "top1.", "perplexity", "latency.ttft", "latency.tpot")
_ENCODERS_ONLY = ("cosine.", "latency.forward")


def _check_gates(recipe: Recipe, parts: Anatomy, target: Target) -> None:
    """Refuses gates on what cannot be measured for this kind of model, instead of leaving them undecided."""
    foreign = _DECODERS_ONLY if parts.kind == "encoder" else _ENCODERS_ONLY
    faults: list[tuple[tuple[str | int, ...], str]] = []
    for index, gate in enumerate(recipe.gates):
        if gate.metric.startswith(foreign):
            faults.append((("gates", index), f"{gate.metric} is not measured for models of this kind ({parts.kind})"))
        elif gate.metric == "bits_per_weight" and target.cast:
            faults.append((("gates", index), f"target {target.name} is a cast and has no bits_per_weight"))
    if faults:
        raise recipe.error(faults)


def _check_positions(recipe: Recipe, parts: Anatomy, checkpoint: Checkpoint) -> None:
    """The benchmark's prompt and answer must fit the model's positions."""
    bench = recipe.bench
    positions = checkpoint.positions
    if bench is None or positions is None:
        return
    length = bench.prompt + (bench.new_tokens - 1 if parts.kind == "decoder" else 0)
    if length > positions:
        answer = f" and {bench.new_tokens} new tokens" if parts.kind == "decoder" else ""
        sentence = f"a prompt of {bench.prompt}{answer} need {length} positions; the model has {positions}"
        raise recipe.error([(("bench", "prompt"), sentence)])


def _matches(name: str, glob: str) -> bool:
    """A glob matches the whole module name or its last parts ("q_proj", "mlp.*")."""
    return fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name, f"*.{glob}")


def _skipped(step: Quantize, parts: Anatomy) -> dict[str, str]:
    """{layer name: reason} for the recipe's `skip`, on top of what is protected anyway."""
    protected = {parts.module_name(tensor) if "." in tensor else tensor for tensor in parts.untouched}
    reasons: dict[str, str] = {}
    lost = []
    for glob in step.skip:
        names = [layer.name for layer in parts.layers if _matches(layer.name, glob)]
        reasons.update({name: f"skip: {glob}" for name in names if name not in reasons})
        if not names and not any(_matches(name, glob) for name in protected):
            lost.append(glob)
    if lost:
        examples = ", ".join(dict.fromkeys(layer.name.rpartition(".")[2] for layer in parts.layers))
        raise UsageError(
            f"skip: no layer matches {', '.join(repr(glob) for glob in lost)}.",
            hint=f"Globs match module names such as {parts.layers[0].name}, or their ends: {examples}.",
        )
    return reasons


def _scheme(step: Quantize, target: Target, layers: Sequence[LinearLayer]) -> Scheme | None:
    if target.bits is None:
        return None
    asked = target.default_group_size if step.group_size is None else step.group_size
    group_size = _auto_group_size(layers) if asked == "auto" and target.grouped else asked
    if group_size == "auto":
        group_size = PER_CHANNEL
    _check_group_size(group_size, layers)
    return Scheme(target.bits, group_size, True, target.activation_bits)


def _auto_group_size(layers: Sequence[LinearLayer]) -> int:
    for size in AUTO_GROUP_SIZES:
        if all(layer.width % size == 0 for layer in layers):
            return size
    smallest = AUTO_GROUP_SIZES[-1]
    raise UsageError(
        f"group size auto: none of {', '.join(map(str, AUTO_GROUP_SIZES))} divides the width of every layer. "
        f"{smallest} fails for:\n" + _offenders([layer for layer in layers if layer.width % smallest]),
        hint="Use --group-size -1 (one scale per output channel), another size, or leave these layers alone with skip.",
    )


def _check_group_size(size: int, layers: Sequence[LinearLayer]) -> None:
    if size == PER_CHANNEL:
        return
    offenders = [layer for layer in layers if layer.width % size]
    if offenders:
        larger = any(layer.width < size for layer in offenders)
        rule = "A group larger than a layer's width is an error too. " if larger else ""
        fitting = [str(other) for other in AUTO_GROUP_SIZES if all(layer.width % other == 0 for layer in layers)]
        sizes = f"--group-size {' or '.join(fitting)}, " if fitting else ""
        raise UsageError(
            f"group size {size} does not divide the input width of {len(offenders)} layers. {rule}They are:\n"
            + _offenders(offenders),
            hint=f"Use {sizes}--group-size -1 (one scale per output channel), or leave these layers alone with skip.",
        )


def _offenders(layers: Sequence[LinearLayer]) -> str:
    return "\n".join(f"  {layer.name}: width {layer.width}" for layer in layers)


def _planned(layer: LinearLayer, scheme: Scheme | None, skipped: Mapping[str, str], target: Target) -> PlannedLayer:
    if scheme is None:
        return PlannedLayer(layer, None, f"cast to {target.cast}")
    if layer.name in skipped:
        return PlannedLayer(layer, None, skipped[layer.name])
    return PlannedLayer(layer, scheme)
