"""The compressed-tensors format: what vLLM and stock transformers load.

W4A16 and W8A16 are `pack-quantized`, W8A8 is `int-quantized`, FP8 `float-quantized`. The configuration is built
from the library's own classes, so that it says what the installed version understands. Stock transformers unpacks
weights at the first forward pass, as `code * scale` in the dtype of the scale. Weights with zero points it loads only
with `dequantize=True`, see `model/zero_points.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from compress.errors import MissingResourceError
from compress.formats import pack as packing
from compress.formats.layout import stem_of
from compress.model.moe import is_expert_group
from compress.scheme import PER_CHANNEL, QuantizedWeight, Scheme, Values

if TYPE_CHECKING:
    from compress.model.anatomy import LinearLayer


def imported() -> ModuleType:
    """compressed_tensors.

    Raises:
        MissingResourceError: it is not installed or does not work here.
    """
    try:
        import compressed_tensors
        import compressed_tensors.quantization  # what the configuration is built from
    except Exception as error:  # a broken installation fails as it pleases
        raise MissingResourceError(
            f"compressed-tensors cannot be imported ({' '.join(str(error).split())[:300]}).",
            hint="pip install compressed-tensors (`compress doctor` shows what works here), or use another --format.",
        ) from error
    found: ModuleType = compressed_tensors
    return found


def quantization_config(
    layers: Sequence[LinearLayer], schemes: Mapping[str, Scheme], untouched: Sequence[str]
) -> dict[str, Any]:
    """The block `quantization_config` of config.json.

    Args:
        untouched: module names, in the stock class, of the linear layers that stay as they are.
    """
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    members: dict[Scheme, list[LinearLayer]] = {}
    for layer in layers:
        if layer.name in schemes:
            members.setdefault(schemes[layer.name], []).append(layer)
    groups = {
        # One scheme applies to the class; several must say which layers are theirs.
        f"group_{index}": _group(scheme, ["Linear"] if len(members) == 1 else patterns(mine, layers))
        for index, (scheme, mine) in enumerate(members.items())
    }
    formats = {_format(scheme) for scheme in members}
    config = QuantizationConfig(
        config_groups=groups,
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=sorted(set(untouched)),
    )
    block: dict[str, Any] = config.model_dump(mode="json")
    return {"version": imported().__version__, "sparsity_config": {}, "transform_config": {}, **block}


def pack(layer: LinearLayer, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of one layer, by their names in the file. Codes [out, in] are packed, never rounded."""
    stem, bits = stem_of(layer), weight.scheme.bits
    tensors = {f"{stem}.weight_scale": weight.scale.contiguous()}
    if weight.scheme.activation_bits is not None:
        return tensors | {f"{stem}.weight": weight.codes.contiguous()}
    tensors[f"{stem}.weight_packed"] = packing.signed_to_int32(weight.codes, bits)
    tensors[f"{stem}.weight_shape"] = torch.tensor(weight.codes.shape, dtype=torch.int64)
    if weight.zero_point is not None:
        tensors[f"{stem}.weight_zero_point"] = packing.zeros_to_int32(weight.zero_point, bits)
    return tensors


def unpack(scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """The inverse of `pack`. `tensors` is keyed by the last part of the names ("weight_packed")."""
    scale = tensors["weight_scale"]
    if scheme.activation_bits is not None:
        return QuantizedWeight(tensors["weight"], scale, None, scheme)
    out, width = (int(size) for size in tensors["weight_shape"])
    codes = packing.int32_to_signed(tensors["weight_packed"], scheme.bits, (out, width))
    if scheme.symmetric:
        return QuantizedWeight(codes, scale, None, scheme)
    zero_point = packing.int32_to_zeros(tensors["weight_zero_point"], scheme.bits, (out, scale.shape[1]))
    return QuantizedWeight(codes, scale, zero_point, scheme)


def scheme_of(group: Mapping[str, Any]) -> Scheme:
    """The scheme that one entry of `config_groups` describes."""
    weights = group["weights"]
    grouped = weights["strategy"] == "group"
    return Scheme(
        bits=weights["num_bits"],
        group_size=weights["group_size"] if grouped else PER_CHANNEL,
        symmetric=weights["symmetric"],
        activation_bits=8 if group.get("input_activations") else None,
        values="float" if weights.get("type") == "float" else "int",
    )


def input_arguments(values: Values) -> Any:
    """How the inputs of a W8A8 layer are rounded: int8 or e4m3, symmetric, one scale per token, found at run time."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

    return QuantizationArgs(
        num_bits=8, type=_type(values), symmetric=True, strategy=QuantizationStrategy.TOKEN, dynamic=True
    )


def patterns(mine: Sequence[LinearLayer], layers: Sequence[LinearLayer]) -> list[str]:
    """Targets that match the layers `mine` and no other one of `layers`: one pattern per name inside a block.

    A pattern is matched from the start of a module's name. It leaves the base model's prefix open, so that it
    holds for the bare model (AutoModel) too, whose names lack it.
    """
    everywhere: dict[str, set[int]] = {}
    for layer in layers:
        everywhere.setdefault(layer.place.stack, set()).add(layer.place.index)
    ends = _ends(list(everywhere))
    found: dict[tuple[str, str], set[int]] = {}
    for layer in mine:
        found.setdefault((layer.place.stack, _inside(layer)), set()).add(layer.place.index)
    targets = []
    for (stack, inside), blocks in found.items():
        numbers = r"\d+" if blocks == everywhere[stack] else f"(?:{'|'.join(map(str, sorted(blocks)))})"
        targets.append(rf"re:(?:.*\.)?{re.escape(ends[stack])}\.{numbers}\.{inside}$")
    return targets


def _inside(layer: LinearLayer) -> str:
    """A pattern for the layer's name inside its block. Experts share one: all of them have one scheme, and vLLM asks
    for it by names that not every file uses (".experts.0.gate_proj").
    """
    if not is_expert_group(layer.fused):
        return re.escape(layer.place.inside)
    path = layer.place.inside.rpartition(".")[0].rpartition(".")[0]
    return rf"{re.escape(path)}\.\d+\.\w+"


def _ends(stacks: Sequence[str]) -> dict[str, str]:
    """For each list of blocks as few of its name's last parts as tell it from the others ("encoder.layers")."""
    for count in range(1, max(stack.count(".") for stack in stacks) + 2):
        ends = {stack: ".".join(stack.split(".")[-count:]) for stack in stacks}
        if len(set(ends.values())) == len(stacks):
            break
    return ends


def _format(scheme: Scheme) -> str:
    return "pack-quantized" if scheme.activation_bits is None else f"{_type(scheme.values)}-quantized"


def _type(values: Values) -> str:
    return "float" if values == "float" else "int"


def _group(scheme: Scheme, targets: list[str]) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if scheme.group_size == PER_CHANNEL:
        weights = QuantizationArgs(
            num_bits=scheme.bits, type=_type(scheme.values), symmetric=scheme.symmetric, strategy="channel"
        )
    else:
        weights = QuantizationArgs(
            num_bits=scheme.bits, symmetric=scheme.symmetric, strategy="group", group_size=scheme.group_size
        )
    inputs = None if scheme.activation_bits is None else input_arguments(scheme.values)
    return QuantizationScheme(targets=targets, weights=weights, input_activations=inputs, format=_format(scheme))
