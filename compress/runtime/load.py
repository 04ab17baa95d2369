"""The reference path: a result folder as an ordinary dense model, computing what stock loaders compute.

Weights are dequantized by the independent reader. Where a layer's inputs are rounded at run time (W8A8, FP8), they
are rounded here by compressed-tensors' own functions, so the reference answers as stock transformers does. LLM.int8
layers are bitsandbytes' own: they multiply integers, set columns with outliers apart, and no dense layer does that.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from compress.errors import BrokenResultError
from compress.formats import bitsandbytes
from compress.formats.read import open_reader
from compress.formats.rounded_inputs import round_inputs_of
from compress.model.load import build_model
from compress.model.naming import module_finder


def load_reference(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A folder that compress wrote (any format) as a dense model in eval mode.

    Raises:
        UsageError, MissingResourceError, BrokenResultError: see `Reader` and `build_model`.
    """
    reader = open_reader(folder)
    state = reader.state_dict(dtype)
    model = build_model(folder, state, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    find = module_finder(model)
    schemes = {name: reader.scheme(name) for name in reader.quantized_names}
    for name, scheme in schemes.items():
        if scheme.activation_bits is None:
            continue  # a dense weight is all there is to it, and experts have no module of their own
        path = find(name)
        if path is None:
            raise BrokenResultError(f"{name}: {type(model).__name__} has no such module.")
        if scheme.values == "llm_int8":
            bias = getattr(model.get_submodule(path), "bias", None)
            model.set_submodule(path, bitsandbytes.linear_8bit(reader.quantized(name), bias, device))
    round_inputs_of(model, schemes)
    return model
