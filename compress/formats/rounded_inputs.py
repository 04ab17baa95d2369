"""Inputs of W8A8 and FP8 layers as compressed-tensors rounds them at run time, for dense modules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from compress.formats.compressed_tensors import input_arguments
from compress.model.naming import module_finder
from compress.scheme import Scheme, Values


def round_inputs_of(model: PreTrainedModel, schemes: Mapping[str, Scheme]) -> None:
    """Has the inputs of the layers rounded whose schemes say so; `schemes` by names in the file."""
    find = module_finder(model)
    for name, scheme in schemes.items():
        path = find(name)
        if scheme.activation_bits is not None and scheme.values != "llm_int8" and path is not None:
            hook = partial(round_inputs, values=scheme.values)
            model.get_submodule(path).register_forward_pre_hook(hook)


def round_inputs(module: torch.nn.Module, inputs: tuple[Any, ...], *, values: Values) -> tuple[Any, ...]:
    """Rounds the first input [batch, tokens, width] to int8 or e4m3 and back, one scale per token.

    The library's own switch `quantization_enabled` turns it off.
    """
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    value, *others = inputs
    if value.numel() == 0 or not getattr(module, "quantization_enabled", True):
        return inputs
    arguments = input_arguments(values)
    scale, zero_point = compute_dynamic_scales_and_zp(value=value, args=arguments, module=module)
    rounded = fake_quantize(x=value, scale=scale, zero_point=zero_point, args=arguments)
    return (rounded, *others)
