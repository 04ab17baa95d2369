"""The GPTQ format, groups in the order of the columns: what GPTQModel and vLLM load.

Version 1 (`gptq`) stores zero points less 1, so it is symmetric here: zero points of 0 would have no bits. Version 2
(`gptq_v2`) stores them as they are.

Tensors per layer [out, in], all transposed with respect to nn.Linear: `qweight`, `qzeros`, `scales`
(float16), `g_idx`. A bias is none of the format's business: it keeps its name and its dtype, and loaders cast
it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from compress.formats import pack as packing
from compress.formats.layout import stem_of
from compress.model.moe import EXPERTS, is_expert_group
from compress.scheme import PER_CHANNEL, QuantizedWeight, Scheme

if TYPE_CHECKING:
    from compress.model.anatomy import LinearLayer

CONFIG_FILE = "quantize_config.json"
FUSED_NAMES = {"qkv": "qkv_proj", "gate_up": "gate_up_proj"}
"""What vLLM calls the matrices that it fuses; its exclusion rules are matched against these names."""


FORMATS: tuple[str, ...] = ("gptq", "gptq_v2")
"""Both versions, as `checkpoint_format` names them."""


def quantization_config(
    layers: Sequence[LinearLayer], schemes: Mapping[str, Scheme], format_name: str
) -> dict[str, Any]:
    """The block `quantization_config` of config.json, and all of quantize_config.json.

    Args:
        format_name: one of FORMATS.
        layers: every linear layer of the blocks. Those without a scheme are excluded by a rule, those whose
            scheme is not the commonest get one of their own.
    """
    used = Counter(schemes[layer.name] for layer in layers if layer.name in schemes)
    common = used.most_common(1)[0][0]
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": common.bits,
        "group_size": common.group_size,
        "desc_act": False,
        "sym": common.symmetric,
        "lm_head": False,
        "checkpoint_format": format_name,
        "pack_dtype": "int32",
    }
    rules: dict[str, dict[str, int]] = {}
    groups: dict[str, set[Scheme | None]] = {}
    for layer in layers:
        groups.setdefault(layer.fused, set()).add(schemes.get(layer.name))
    for layer in layers:
        scheme = schemes.get(layer.name)
        pattern = _pattern(layer, whole_group=len(groups[layer.fused]) == 1)
        if scheme is None:
            rules[f"-:{pattern}"] = {}
        elif scheme != common:
            rules[f"+:{pattern}"] = {"bits": scheme.bits, "group_size": scheme.group_size}
            if scheme.symmetric != common.symmetric:
                rules[f"+:{pattern}"]["sym"] = scheme.symmetric
    if rules:
        config["dynamic"] = rules
    inside = _same_in_every_block(layers, schemes)
    if len(used) == 1 and inside is not None:
        # Optimum knows no rules; it reads this list.
        config["modules_in_block_to_quantize"] = [inside]
    return config


def pack(layer: LinearLayer, weight: QuantizedWeight, version: Literal[1, 2]) -> dict[str, torch.Tensor]:
    """The tensors of one layer, by their names in the file. Codes [out, in] are packed, never rounded."""
    stem, bits = stem_of(layer), weight.scheme.bits
    width, groups = weight.codes.shape[1], weight.scale.shape[1]
    zero_points = torch.zeros(weight.scale.shape, dtype=torch.int8) if weight.zero_point is None else weight.zero_point
    return {
        f"{stem}.qweight": packing.gptq_qweight(weight.codes, bits),
        f"{stem}.qzeros": packing.gptq_qzeros(zero_points, bits, version),
        f"{stem}.scales": weight.scale.T.contiguous(),
        f"{stem}.g_idx": torch.arange(width, dtype=torch.int32) // (width // groups),
    }


def scheme_of(config: Mapping[str, Any], name: str) -> Scheme:
    """The scheme of the quantized layer `name`: the defaults, changed by the first rule that matches."""
    settings = {**config, **(override(config, name) or {})}
    group_size = settings["group_size"]
    size = PER_CHANNEL if group_size == -1 else group_size
    return Scheme(bits=settings["bits"], group_size=size, symmetric=settings["sym"])


def override(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """What the first rule of `dynamic` that matches `name` changes; {} if none matches, None if it excludes.

    As in GPTQModel (`dynamic_get`) and vLLM (`get_dynamic_override`).
    """
    rules: Mapping[str, Mapping[str, Any]] = config.get("dynamic") or {}
    for rule, changes in rules.items():
        if re.match(rule.removeprefix("-:").removeprefix("+:"), name):
            return None if rule.startswith("-:") else changes
    return {}


def _pattern(layer: LinearLayer, *, whole_group: bool) -> str:
    """A regular expression for the layer's name in the file, in the stock class and, fused, in vLLM.

    The fused name stands for all members, so it is there only if the rule holds for the `whole_group`.
    """
    if is_expert_group(layer.fused):
        return expert_pattern(min(layer.name, stem_of(layer), key=len))
    parent, _, last = min(layer.name, stem_of(layer), key=len).rpartition(".")
    names = [re.escape(last)]
    fused = FUSED_NAMES.get(layer.fused.rpartition(":")[2])
    if fused is not None and whole_group:
        names.append(fused)
    return rf"(?:.*\.)?{re.escape(parent)}\.(?:{'|'.join(names)})$"


def expert_pattern(name: str) -> str:
    """A regular expression for all experts of a block, from the name of one of their layers, in the stock class too.

    vLLM asks the rules about their common name ("model.layers.0.mlp.experts").
    """
    block = name.rpartition(f".{EXPERTS}.")[0].rpartition(".")[0]
    return rf"(?:.*\.)?{re.escape(block)}\.\w+\.{EXPERTS}(?:\.\d+\.\w+)?$"


def _same_in_every_block(layers: Sequence[LinearLayer], schemes: Mapping[str, Scheme]) -> list[str] | None:
    """Names, inside a block, of the quantized layers.

    None if nothing is skipped, if there are experts (Optimum knows none), if blocks differ, or if a skipped layer's
    name contains a quantized one's (`attention.output.dense` and `output.dense`): loaders would take it for quantized.
    """
    skipped = [layer.name for layer in layers if layer.name not in schemes]
    if not skipped or any(is_expert_group(layer.fused) for layer in layers):
        return None
    blocks: dict[int, list[str]] = {}
    for layer in layers:
        inside = blocks.setdefault(layer.block, [])
        if layer.name in schemes:
            inside.append(layer.place.inside)
    first, *others = blocks.values()
    if any(inside in name for inside in first for name in skipped):
        return None
    return first if all(other == first for other in others) else None
