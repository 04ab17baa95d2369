"""Whether a gptq configuration says what other loaders must read, and says it of the layers that are quantized.

Our own reader knows how the tensors are meant, so it would not notice a configuration that makes other loaders
read them differently. Each loader is followed here in how it chooses the layers that it expects as quantized:

    GPTQModel, vLLM   `dynamic`: the first rule that matches the start of the module's name; "-:" excludes it
    Optimum           `modules_in_block_to_quantize`: names that end with an entry
    vLLM              the same list: names that contain an entry
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from compress.formats import gptq
from compress.model.architectures import ARCHITECTURES, Architecture
from compress.model.moe import block_linears, is_expert_group

_ALLOWED: dict[str, tuple[object, ...]] = {
    "quant_method": ("gptq",),
    "checkpoint_format": gptq.FORMATS,
    "bits": (4, 8),
    "sym": (True, False),
    "desc_act": (False,),
    "lm_head": (False,),
}
_ALLOWED_IF_THERE: dict[str, tuple[object, ...]] = {
    "pack_dtype": ("int32",),
    "format": gptq.FORMATS,  # other spellings of checkpoint_format and quant_method
    "method": ("gptq",),
    "is_marlin_format": (False,),
}


def faults(config: Mapping[str, Any], model: Mapping[str, Any], tensors: Collection[str]) -> list[str]:
    """What is wrong with the block `quantization_config`, a sentence each with what was found and expected.

    Args:
        config: the block.
        model: the whole config.json.
        tensors: names of all tensors in the folder.
    """
    found = [*_value_faults(config, "quantization_config"), *_rule_faults(config)]
    # Who is quantized can be asked only of rules and lists that are well-formed.
    return found or [*_layer_faults(config, model, tensors)]


def file_faults(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """How quantize_config.json, which some loaders prefer, differs from the block; nothing if it is not there."""
    path = folder / gptq.CONFIG_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        return [f"{path.name} cannot be read: {error}"]
    if not isinstance(stored, dict):
        return [f"{path.name} is not an object"]
    return [
        f"{path.name}: {key}: found {_json(stored, key)}, expected {_json(config, key)} as in config.json"
        for key in sorted(stored.keys() | config.keys())
        if _json(stored, key) != _json(config, key)
    ]


def _value_faults(config: Mapping[str, Any], where: str) -> Iterator[str]:
    for key, allowed in (_ALLOWED | _ALLOWED_IF_THERE).items():
        # Compared as JSON, where 1 is not true.
        expected = [json.dumps(value) for value in allowed]
        if (key in config or key in _ALLOWED) and _json(config, key) not in expected:
            yield f"{where}: {key}: found {_json(config, key)}, expected {' or '.join(expected)}"
    version = config.get("checkpoint_format")
    if config.get("format", version) != version:
        yield f"{where}: format: found {_json(config, 'format')}, expected {_json(config, 'checkpoint_format')}"
    if config.get("sym") is False and version == "gptq":
        yield f"{where}: sym: found false, expected true: version 1 of the format has no zero point of 0"
    size = config.get("group_size")
    if type(size) is not int or (size != -1 and size < 1):
        yield f"{where}: group_size: found {_json(config, 'group_size')}, expected -1 or a positive integer"


def _rule_faults(config: Mapping[str, Any]) -> Iterator[str]:
    rules = config.get("dynamic") or {}
    if not isinstance(rules, dict):
        yield f"quantization_config: dynamic: found {json.dumps(rules)}, expected an object of rules"
        return
    for rule, changes in rules.items():
        where = f"quantization_config: dynamic: {rule}"
        try:
            re.compile(rule[2:])
        except re.error as error:
            yield f"{where}: found no regular expression ({error}), expected one"
        if not isinstance(changes, dict):
            yield f"{where}: found {json.dumps(changes)}, expected an object"
        elif not rule.startswith("-:"):
            yield from _value_faults({**config, **changes}, where)
    lists = config.get("modules_in_block_to_quantize")
    if lists is not None and not _is_list_of_lists(lists):
        found = json.dumps(lists)
        yield f"quantization_config: modules_in_block_to_quantize: found {found}, expected a list of lists of names"


def _is_list_of_lists(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in value
    )


def _layer_faults(config: Mapping[str, Any], model: Mapping[str, Any], tensors: Collection[str]) -> Iterator[str]:
    """Layers of blocks that are quantized and that the configuration excludes, or the other way round."""
    entry = ARCHITECTURES.get(model["model_type"])
    if entry is None:
        yield f"config.json: model_type: found {model['model_type']}, expected one of {', '.join(ARCHITECTURES)}"
        return
    depth = model.get(entry.depth, model.get("num_hidden_layers"))
    if type(depth) is not int:
        yield f"config.json: {entry.depth}: found {json.dumps(depth)}, expected the number of blocks"
        return
    prefixed = any(name.startswith(f"{entry.base}.{entry.blocks}.") for name in tensors)
    # Names in a file without the base model's prefix stand for those of classes with it and without it.
    prefixes = [f"{entry.base}."] if prefixed else ["", f"{entry.base}."]
    quantized = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    seen: set[str] = set()
    for block in range(depth):
        members: dict[str, list[str]] = {}
        for suffix, fused in block_linears(entry.linears, entry.experts, model, block):
            name = f"{entry.blocks}.{block}.{suffix}"
            members.setdefault(fused, []).append(name)
            seen.add(prefixes[0] + name)
            for prefix in prefixes:
                yield from _choice_faults(config, prefix + name, prefixes[0] + name in quantized)
        for prefix in prefixes:
            for fused, names in members.items():
                members_quantized = [prefix + name for name in names if prefixes[0] + name in quantized]
                yield from _fused_faults(config, fused, prefix + names[0], members_quantized)
            yield from _expert_faults(config, entry, f"{prefix}{entry.blocks}.{block}", members)
    for name in sorted(quantized - seen):
        yield f"{name}: found a qweight, expected none: it is no linear layer of a block"


def _choice_faults(config: Mapping[str, Any], name: str, quantized: bool) -> Iterator[str]:
    found = f"{name}: found {'a' if quantized else 'no'} qweight"
    if (gptq.override(config, name) is not None) != quantized:
        yield f"{found}, expected {'none' if quantized else 'one'} by quantization_config: dynamic"
    lists = config.get("modules_in_block_to_quantize")
    if lists is not None:
        entries = [entry for names in lists for entry in names]
        chosen = {any(name.endswith(entry) for entry in entries), any(entry in name for entry in entries)}
        if chosen != {quantized}:
            expected = "none" if quantized else "one"
            yield f"{found}, expected {expected} by quantization_config: modules_in_block_to_quantize"


def _fused_faults(config: Mapping[str, Any], fused: str, member: str, quantized: list[str]) -> Iterator[str]:
    """vLLM asks the rules about the fused matrix, which is quantized as soon as a member is, and as they are."""
    if fused not in gptq.FUSED_NAMES:
        return
    name = f"{member.rpartition('.')[0]}.{gptq.FUSED_NAMES[fused]}"
    where = f"quantization_config: dynamic: {name}"
    if (gptq.override(config, name) is not None) != bool(quantized):
        found, expected = ("excluded", "included") if quantized else ("included", "excluded")
        yield f"{where}: found {found}, expected {expected}, as its members are"
        return
    for part in quantized:
        scheme, own = gptq.scheme_of(config, name), gptq.scheme_of(config, part)
        if scheme != own:
            yield f"{where}: found {scheme.label}, expected {own.label} as {part.rpartition('.')[2]} has"


def _expert_faults(
    config: Mapping[str, Any], entry: Architecture, block: str, members: Mapping[str, list[str]]
) -> Iterator[str]:
    """vLLM asks the rules about the experts of a block by their common name, GPTQModel by those of the stock class."""
    first = next((names[0] for group, names in members.items() if is_expert_group(group)), None)
    if first is None or entry.experts is None:
        return
    own = gptq.override(config, f"{block}.{entry.experts.path}.0.{entry.experts.gate}")
    for name in (f"{block}.{entry.experts.path}", f"{block}.{entry.experts.module}.0.gate_proj"):
        if gptq.override(config, name) != own:
            found, expected = json.dumps(gptq.override(config, name)), json.dumps(own)
            yield f"quantization_config: dynamic: {name}: found {found}, expected {expected}, as its experts have"


def _json(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], sort_keys=True) if key in config else "nothing"
