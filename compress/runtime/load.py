"""The reference path: a result folder as an ordinary dense model, computing what stock loaders compute.

Weights are dequantized by the independent reader. Where a layer's inputs are rounded at run time (W8A8), they
are rounded here by compressed-tensors' own functions, so the reference answers as stock transformers does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from compress.errors import BrokenResultError
from compress.formats.compressed_tensors import input_arguments
from compress.formats.read import Reader
from compress.model.load import build_model


def load_reference(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A folder that compress wrote (any format) as a dense model in eval mode.

    Raises:
        UsageError, MissingResourceError, BrokenResultError: see `Reader` and `build_model`.
    """
    reader = Reader(folder)
    state = reader.state_dict(dtype)
    model = build_model(folder, state, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    for name in reader.quantized_names:
        if reader.scheme(name).activation_bits is not None:
            module = _module(model, name)
            module.register_forward_pre_hook(round_inputs)
    return model


def _module(model: PreTrainedModel, name: str) -> torch.nn.Module:
    """The module whose tensors the file calls `name`, with or without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    modules: dict[str, torch.nn.Module] = dict(model.named_modules())
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        if candidate in modules:
            return modules[candidate]
    raise BrokenResultError(f"{name}: {type(model).__name__} has no such module.")


def round_inputs(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rounds the first input [batch, tokens, width] to int8 and back, one scale per token."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    value, *others = inputs
    if value.numel() == 0:
        return inputs
    arguments = input_arguments()
    scale, zero_point = compute_dynamic_scales_and_zp(value=value, args=arguments, module=module)
    rounded = fake_quantize(x=value, scale=scale, zero_point=zero_point, args=arguments)
    return (rounded, *others)
