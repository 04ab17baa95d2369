"""Whether weights and config.json belong together, found from headers before anything long begins.

The judge is stock `from_pretrained` itself, given tensors of the file's names, shapes and dtypes on the meta device:
prefixes, renamed keys, ties, old buffers and whatever else a class forgives are exactly those of the real load.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from compress.errors import UsageError
from compress.model.anatomy import HEAD, LinearLayer
from compress.model.checkpoint import Checkpoint, read_json_object
from compress.model.inputs import random_inputs
from compress.model.load import (
    config_errors,
    empty_model,
    from_pretrained,
    model_class,
    plain_config,
    quiet_transformers,
)
from compress.model.naming import module_finder

_SHOWN = 20
_GENERATION_FILE = "generation_config.json"


def check_fit(
    checkpoint: Checkpoint,
    *,
    trust_remote_code: bool = False,
    found: Sequence[LinearLayer] = (),
    packed: Sequence[LinearLayer] = (),
    compressed: bool = False,
    reads_text: bool = True,
) -> None:
    """Compares names and shapes with what the stock class expects, and tied weights that are stored twice.

    Tied weights are compared by value only where the weights are at hand. No other data is read.

    Args:
        found: layers that were found by name and are to be quantized: the class must have an nn.Linear for each.
        packed: those of them that loading gives no `weight` before the first forward pass, which the class must bear.
        compressed: loading goes through transformers' quantizer for compressed-tensors, which the class must bear.
        reads_text: if not, inputs must be makeable from config.json.

    Raises:
        UsageError: the class cannot be built from config.json, the weights do not fit it (all problems at once), a
            layer found by name is none, or generation_config.json is damaged.
    """
    cls = model_class(checkpoint.config, folder=checkpoint.folder, trust_remote_code=trust_remote_code)
    _check_model_type(cls, checkpoint)
    config = plain_config(cls, checkpoint.folder)
    model = empty_model(cls, config, checkpoint.folder)
    report = _loading_report(cls, config, checkpoint)
    problems = [*_loading_problems(report), *_tie_problems(model, checkpoint)]
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UsageError(
            f"{checkpoint.source}: the weights do not fit config.json as {cls.__name__}:\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more,
            hint="the folder is incomplete, config.json belongs to another model, or `architectures` names the "
            "wrong class"
            + ("; where the output head is the input embedding, config.json must say so: tie_word_embeddings: true")
            * (problems == [f"{HEAD}: missing"]),
        )
    _check_linear(model, found)
    _check_packed(model, packed)
    if compressed:
        _check_conversions(model)
    if not reads_text:
        random_inputs(cls, config, seed=0, count=1)
    _check_generation_config(model, checkpoint.folder)


def _check_linear(model: PreTrainedModel, found: Sequence[LinearLayer]) -> None:
    """Raises UsageError, naming them, for layers that the class computes otherwise than an nn.Linear."""
    find = module_finder(model)
    others = []
    for layer in found:
        name = find(layer.name)
        module = None if name is None else model.get_submodule(name)
        if type(module) is not nn.Linear:
            others.append((layer, "no module of its own" if module is None else type(module).__name__))
    if others:
        globs = _globs([layer for layer, _ in others], found)
        more = f"\n  and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise UsageError(
            f"{len(others)} weights look like those of linear layers, but {type(model).__name__} computes with "
            "something else than nn.Linear there:\n  "
            + "\n  ".join(f"{layer.name}: {what}" for layer, what in others[:_SHOWN])
            + more,
            hint=f"leave them alone: skip {', '.join(globs)}",
        )


def _globs(others: Sequence[LinearLayer], found: Sequence[LinearLayer]) -> dict[str, None]:
    """What names `others`, and none of the other layers that are `found`."""
    kept = {layer.name for layer in found} - {layer.name for layer in others}

    def first(globs: Iterable[str], default: str) -> str:
        return next((one for one in globs if not any(fnmatchcase(f".{name}", f"*.{one}") for name in kept)), default)

    named: dict[str, None] = {}
    stacks = {layer.place.stack: None for layer in others}
    whole = [stack for stack in stacks if len(stacks) < len({layer.place.stack for layer in found})]
    for layer in others:
        inside = re.sub(r"\.\d+\.", ".*.", layer.place.inside)
        of_stack = [f"{layer.place.stack}.*"] if layer.place.stack in whole else []
        named[first([*of_stack, inside], layer.name)] = None
    return named


def _check_packed(model: PreTrainedModel, packed: Sequence[LinearLayer]) -> None:
    """Raises UsageError if initialising the class, as loading does, asks packed layers for their weight."""
    find = module_finder(model)
    for layer in packed:
        delattr(model.get_submodule(str(find(layer.name))), "weight")
    for module in model.modules() if packed else ():
        try:
            cast(Any, model)._init_weights(module)
        except AttributeError as error:
            if "'weight'" not in str(error):
                continue
            raise UsageError(
                f"stock transformers cannot load {type(model).__name__} with packed weights: it initialises the "
                f"`weight` of layers in a {type(module).__name__}, which packed layers lack",
                hint="use another target, such as int8",
            ) from error
        except Exception:  # noqa: BLE001 - on tensors without values much else can fail, which says nothing
            continue


def _check_conversions(model: PreTrainedModel) -> None:
    """Raises UsageError if the class splits a weight while it is loaded.

    The quantizer gives every such step all names of a quantized weight's tensors, and transformers then refuses what
    has several names on both sides.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    steps = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightConverter)]
    split = [
        source
        for step in steps
        if len(step.target_patterns) > 1 and not any(one.supports_many_to_many for one in step.operations)
        for source in step.source_patterns
        if source.endswith(".weight")
    ]
    if split:
        raise UsageError(
            f"stock transformers cannot load {type(model).__name__} from compressed-tensors: the class splits "
            f"{', '.join(split)} while it is loaded, which transformers cannot do with what is quantized",
            hint="use a target of bitsandbytes, such as nf4",
        )


def _check_model_type(cls: type[PreTrainedModel], checkpoint: Checkpoint) -> None:
    """A stock class built from the fields of another model type takes its own defaults for what is missing."""
    expected = getattr(cls.config_class, "model_type", "")
    if cls.__module__.startswith("transformers.") and expected != checkpoint.model_type:
        raise UsageError(
            f"{checkpoint.source}: config.json names the class {cls.__name__}, which is for the model type "
            f"{expected!r}, but its model_type is {checkpoint.model_type!r}",
            hint="correct `architectures` or `model_type` in config.json",
        )


def _loading_report(
    cls: type[PreTrainedModel], config: transformers.PreTrainedConfig, checkpoint: Checkpoint
) -> Mapping[str, Any]:
    state = {name: torch.empty(info.shape, device="meta") for name, info in checkpoint.tensors.items()}
    with quiet_transformers(), config_errors(cls, checkpoint.folder):
        _, report = from_pretrained(
            cls, None, config=config, state_dict=state, dtype=torch.float32, device_map={"": "meta"}
        )
    return report


def _loading_problems(report: Mapping[str, Any]) -> Iterator[str]:
    for name, found, expected in sorted(report.get("mismatched_keys", ())):
        yield f"{name}: the file has {list(found)}, the class expects {list(expected)}"
    for name in sorted(report.get("missing_keys", ())):
        yield f"{name}: missing"
    for name in sorted(report.get("unexpected_keys", ())):
        yield f"{name}: not expected"
    yield from map(str, report.get("error_msgs", ()))


def _tie_problems(model: PreTrainedModel, checkpoint: Checkpoint) -> Iterator[str]:
    """Of two tensors that the class ties, one would be lost in silence, or the tie, depending on who loads them.

    Where config.json itself says that nothing is tied, values decide, as they do in a stock load: the class of T5 1.1
    (Flan-T5) ties its head nevertheless.
    """
    if checkpoint.config.get("tie_word_embeddings") is False:
        return
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name, other in sorted(ties.items()):
        stored, kept = (_stored(key, model.base_model_prefix, checkpoint.tensors) for key in (name, other))
        if stored is not None and kept is not None and _differ(checkpoint, stored, kept):
            yield (
                f"{stored}: tied to {kept} by config.json (tie_word_embeddings), but the file holds other values; set "
                f"tie_word_embeddings to false to keep both, or remove {stored}"
            )


def _stored(name: str, prefix: str, tensors: Iterable[str]) -> str | None:
    """The name under which the file has a tensor of the class: the base model's prefix may be there or not."""
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in tensors), None)


def _differ(checkpoint: Checkpoint, one: str, other: str) -> bool:
    if checkpoint.tensors[one].shape != checkpoint.tensors[other].shape:
        return True
    if not checkpoint.has_weights:
        return False
    first, second = checkpoint.read(one), checkpoint.read(other)
    return not torch.equal(first, second.to(first.dtype))


def _check_generation_config(model: PreTrainedModel, folder: Path) -> None:
    path = folder / _GENERATION_FILE
    if not path.exists():
        return
    read_json_object(path)
    if not model.can_generate():
        return
    try:
        with quiet_transformers():
            transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its validation is a chain of comparisons that raise what they please
        raise UsageError(
            f"{path}: transformers rejects it ({type(error).__name__}: {' '.join(str(error).split())[:300]})",
            hint="correct the file, or remove it",
        ) from error
