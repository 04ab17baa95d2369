"""What bitsandbytes stores for a layer: names, shapes and dtypes of `Linear4bit` and `Linear8bitLt`, without torch.

    nf4         weight uint8 [out * in / 2, 1], weight.absmax, weight.quant_map, weight.quant_state.bitsandbytes__nf4
    int8-bnb    weight int8 [out, in], SCB (each row's largest magnitude), weight_format (0: row by row)

Weights stand in the orientation of nn.Linear whatever the source's: transformers makes linear layers of Conv1D too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from compress.formats.stored import StoredTensor
from compress.scheme import NF4_LEVELS, PER_CHANNEL, Scheme

if TYPE_CHECKING:
    from compress.model.anatomy import LinearLayer

BLOCK = 64
"""Neighbouring weights of one NF4 block: transformers has no setting for it."""
CPU_ROWS, _LISTED = 32, 3
"""Rows that `_convert_weight_packed_for_cpu` of bitsandbytes 0.50 takes together; it asserts that nothing is left."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def tensors(layer: LinearLayer, scheme: Scheme) -> tuple[StoredTensor, ...]:
    """The tensors that stand in the file for one quantized weight."""
    weight, stem = layer.tensor, layer.tensor.removesuffix(".weight")
    if scheme.values == "llm_int8":
        return (
            StoredTensor(weight, "I8", (layer.out, layer.width)),
            StoredTensor(f"{stem}.SCB", "F32", (layer.out,)),
            StoredTensor(f"{stem}.weight_format", "U8", ()),
        )
    return (
        StoredTensor(weight, "U8", (layer.parameters // 2, 1)),
        StoredTensor(f"{weight}.absmax", "F32", (layer.parameters // BLOCK,)),
        StoredTensor(f"{weight}.quant_map", "F32", (len(NF4_LEVELS),)),
        StoredTensor(f"{weight}.quant_state.bitsandbytes__nf4", "U8", (len(quant_state(layer)),)),
    )


def quant_state(layer: LinearLayer) -> bytes:
    """What is no tensor of the library's `QuantState`, as it writes it; dtype is what the weight was and becomes."""
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": _DTYPES[layer.dtype],
        "shape": [layer.out, layer.width],
    }
    return json.dumps(state).encode()


def refusal(layer: LinearLayer, scheme: Scheme) -> str | None:
    """Why the format cannot hold a layer, or None."""
    if scheme.values not in ("nf4", "llm_int8"):
        return f"bitsandbytes holds NF4 and LLM.int8 weights, not {scheme.label}"
    if layer.dtype not in _DTYPES:
        return f"its dtype {layer.dtype} is none that bitsandbytes quantizes"
    if scheme.values == "llm_int8":
        return None if scheme.group_size == PER_CHANNEL else "LLM.int8 has one scale per output channel"
    if scheme.group_size != BLOCK:
        return f"NF4 is stored in blocks of {BLOCK} weights, not {scheme.group_size}"
    return f"its width {layer.width} is no multiple of {BLOCK}, the block of NF4" if layer.width % BLOCK else None


def cpu_note(layers: Iterable[LinearLayer], schemes: Mapping[str, Scheme]) -> str | None:
    """What to know where the library's kernel for some processors cannot run a layer that others can."""
    narrow = [
        layer.name
        for layer in layers
        if layer.name in schemes and schemes[layer.name].values == "nf4" and layer.out % CPU_ROWS
    ]
    if not narrow:
        return None
    named = ", ".join(narrow[:_LISTED]) + (f" and {len(narrow) - _LISTED} more" if len(narrow) > _LISTED else "")
    return (
        f"on processors with bfloat16 instructions (AVX-512 BF16) bitsandbytes runs no NF4 layer whose outputs are no "
        f"multiple of {CPU_ROWS}: {named}; GPUs and other processors run them"
    )
