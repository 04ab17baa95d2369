"""The independent reader of bitsandbytes tensors, from the description of the format (bitsandbytes, `QuantState`
and `Linear8bitLt`); it shares no code with the packing.

    NF4         code(2 i) = weight[i] >> 4, code(2 i + 1) = weight[i] & 15, over the rows of [out, in] one after another
                w(n) = quant_map[code(n)] * absmax[n // 64]
    LLM.int8    w(o, i) = weight[o, i] * SCB[o] / 127
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from compress.errors import BrokenResultError
from compress.scheme import NF4_LEVELS, PER_CHANNEL, QuantizedWeight, Scheme

PARTS = (
    *("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    *("SCB", "weight_format"),
)
MARKS = ("weight.absmax", "SCB")
"""The parts one of which every quantized layer has, and no other one."""
_NF4 = Scheme(4, 64, values="nf4")
_LLM_INT8 = Scheme(8, PER_CHANNEL, activation_bits=8, values="llm_int8")
_ASKED = {
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_threshold": 6.0,
    "llm_int8_has_fp16_weight": False,
}


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme of all quantized layers.

    Raises:
        BrokenResultError: settings that compress never writes; loaders would compute something else.
    """
    four, eight = config.get("load_in_4bit") is True, config.get("load_in_8bit") is True
    wrong = [f"{key} is {config[key]!r}" for key, value in _ASKED.items() if config.get(key, value) != value]
    if four == eight:
        wrong.append("it must say exactly one of load_in_4bit and load_in_8bit")
    if four and config.get("bnb_4bit_quant_type") != "nf4":
        wrong.append(f"bnb_4bit_quant_type is {config.get('bnb_4bit_quant_type')!r}")
    if wrong:
        raise BrokenResultError(f"quantization_config is none that compress writes: {'; '.join(wrong)}.")
    return _NF4 if four else _LLM_INT8


def unpack(name: str, scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """The quantized weight that the tensors of one layer stand for, keyed by `PARTS`.

    Raises:
        BrokenResultError: they contradict the scheme.
        KeyError: one is missing.
    """
    if scheme.values == "llm_int8":
        return _unpack_8bit(name, tensors)
    return _unpack_4bit(name, tensors)


def _unpack_8bit(name: str, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    codes, scale = tensors["weight"], tensors["SCB"]
    if int(tensors["weight_format"]) != 0:
        raise BrokenResultError(f"{name}: weight_format is not 0, so the codes are not stored row by row.")
    if codes.dtype != torch.int8 or codes.dim() != 2 or scale.shape != codes.shape[:1]:
        raise BrokenResultError(f"{name}: weight and SCB do not fit {_LLM_INT8.label}.")
    return QuantizedWeight(codes, scale.unsqueeze(1), None, _LLM_INT8)


def _unpack_4bit(name: str, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    state = json.loads(tensors["weight.quant_state.bitsandbytes__nf4"].numpy().tobytes())
    out, width = (int(size) for size in state["shape"])
    levels = np.asarray(NF4_LEVELS, np.float32)
    size = _NF4.group_size
    if (state["quant_type"], state["blocksize"]) != ("nf4", size) or width % size:
        raise BrokenResultError(f"{name}: its quant_state is not that of {_NF4.label}.")
    if not np.array_equal(tensors["weight.quant_map"].numpy(), levels):
        raise BrokenResultError(f"{name}: quant_map does not hold the levels of NF4.")
    packed = tensors["weight"].numpy().reshape(-1)
    codes = np.empty((packed.size, 2), np.int8)
    codes[:, 0] = packed >> 4
    codes[:, 1] = packed & 15
    scale = tensors["weight.absmax"].reshape(out, width // size)
    return QuantizedWeight(torch.from_numpy(codes.reshape(out, width)), scale, None, _NF4)
