"""Weights with zero points as transformers loads them: code less zero point, times scale, rounded to the scale's dtype.

That is right for a model that computes in this dtype anyway; the proof compares models in float32, where the rounding
would hide a fault of the same size. So it is checked to be this rounding, bit for bit, and taken back.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from compress.errors import BrokenResultError
from compress.formats.read import Reader
from compress.model.naming import module_finder


@torch.no_grad()
def take_back_rounding(model: PreTrainedModel, folder: Path) -> None:
    """Gives a model that was loaded with `dequantize=True` in float32 the products before they were rounded.

    Raises:
        BrokenResultError: a loaded weight is another one than the file's weight rounds to.
    """
    reader, find = Reader(folder), module_finder(model)
    wrong = []
    for name in reader.quantized_names:
        module = find(name)
        stored, loaded = reader.quantized(name), None if module is None else model.get_submodule(module).weight
        if not isinstance(loaded, torch.Tensor):
            wrong.append(name)
            continue
        if not torch.equal(loaded, stored.dequantize(stored.scale.dtype).to(loaded.dtype)):
            wrong.append(name)
        loaded.copy_(stored.dequantize(torch.float32))
    if wrong:
        raise BrokenResultError(f"{len(wrong)} weights are not what the file holds, {wrong[0]} among them.")
