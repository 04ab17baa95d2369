"""The independent reader: a folder of ours back into quantized weights, or into a dense model's tensors.

What each format's tensors stand for is in `gptq_read.py`, `bitsandbytes_read.py` and, with the library's own
unpacking, in `compressed_tensors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compress.errors import BrokenResultError
from compress.formats import bitsandbytes_read, compressed_tensors, gptq, gptq_check, gptq_read
from compress.formats.config_groups import group_of
from compress.formats.gguf_read import GgufReader
from compress.model.architectures import ARCHITECTURES
from compress.model.checkpoint import open_checkpoint
from compress.scheme import QuantizedWeight, Scheme

_PARTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight"),
    "gptq": gptq_read.PARTS,
    "bitsandbytes": bitsandbytes_read.PARTS,
}
_MARKS = {
    "compressed-tensors": ("weight_scale",),
    "gptq": gptq_read.MARKS,
    "bitsandbytes": bitsandbytes_read.MARKS,
}
"""The part that every quantized layer has and no other one; of several, one of them."""
_LISTED = 20


class Reader:
    """A folder in one of our formats; layers go by the names that their tensors have in the file.

    Raises:
        MissingResourceError, UsageError: see `open_checkpoint`.
        BrokenResultError: the quantization that config.json describes is none of ours, or other loaders would
            read these tensors differently than this one does.
    """

    def __init__(self, folder: Path) -> None:
        self._checkpoint = open_checkpoint(folder)
        self._config: Mapping[str, Any] = self._checkpoint.config.get("quantization_config") or {}
        self._method = self._config.get("quant_method")
        if self._config and self._method not in _PARTS:
            raise BrokenResultError(f"{folder}: quantization method '{self._method}' is not one that compress writes.")
        if self._method == "gptq":
            self._check_gptq()
        endings = tuple(f".{mark}" for mark in _MARKS.get(str(self._method), ()))
        self.quantized_names: tuple[str, ...] = tuple(
            name.removesuffix(ending)
            for name in self._checkpoint.tensors
            for ending in endings
            if name.endswith(ending)
        )

    def _check_gptq(self) -> None:
        folder, tensors = self._checkpoint.folder, self._checkpoint.tensors
        found = gptq_check.faults(self._config, self._checkpoint.config, tensors)
        found += gptq_check.file_faults(folder, self._config)
        if found:
            more = f"\n  ... and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            raise BrokenResultError(
                f"{folder}: other loaders would not read this gptq folder as it is meant:\n  "
                + "\n  ".join(found[:_LISTED])
                + more,
                hint="Write the folder again; its config.json or its weight files were changed.",
            )

    def scheme(self, name: str) -> Scheme:
        """How the layer is quantized, according to config.json."""
        if self._method == "gptq":
            return gptq.scheme_of(self._config, name)
        if self._method == "bitsandbytes":
            return bitsandbytes_read.scheme_of(self._config)
        group = group_of(self._config["config_groups"], name)
        if group is None:
            raise BrokenResultError(f"{name} is quantized, but no group of quantization_config applies to it.")
        return compressed_tensors.scheme_of(group)

    def quantized(self, name: str) -> QuantizedWeight:
        """The quantized weight of one layer, equal to the one that was written.

        Raises:
            BrokenResultError: the tensors and config.json contradict each other.
        """
        if self._method is None:
            raise BrokenResultError(f"{self._checkpoint.folder} holds no quantized weights.")
        scheme = self.scheme(name)
        names = {part: f"{name}.{part}" for part in _PARTS[self._method]}
        present = {part: full for part, full in names.items() if full in self._checkpoint.tensors}
        stored = self._checkpoint.read_many(present.values())
        tensors = {part: stored[full] for part, full in present.items()}
        try:
            if self._method == "gptq":
                return gptq_read.unpack(name, scheme, tensors, gptq_read.VERSIONS[self._config["checkpoint_format"]])
            if self._method == "bitsandbytes":
                return bitsandbytes_read.unpack(name, scheme, tensors)
            return compressed_tensors.unpack(scheme, tensors)
        except KeyError as error:
            raise BrokenResultError(f"{name}: tensor {error.args[0]} is missing.") from error
        except (RuntimeError, ValueError) as error:
            raise BrokenResultError(f"{name}: its tensors do not fit {scheme.label}: {error}") from error

    def as_loaded(self, name: str) -> torch.Tensor:
        """The weight of one layer, float32 [out, in], as transformers computes with it.

        That is code times scale, but for experts of a compressed-tensors folder: while it stacks them, transformers
        expands them in the dtype of their scales, whatever dtype is asked for.
        """
        weight = self.quantized(name)
        dense = weight.dequantize(torch.float32)
        entry = ARCHITECTURES.get(self._checkpoint.model_type)
        experts = None if entry is None else entry.experts
        if self._method == "compressed-tensors" and experts is not None and f".{experts.path}." in f".{name}":
            return dense.to(weight.scale.dtype).float()
        return dense

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All weights as the dense model names them, floating ones in `dtype`.

        Quantized weights are dequantized in float32 and rounded once. Conv1D weights are turned
        back to [in, out].
        """
        method = self._method
        parts = {f"{name}.{part}" for name in self.quantized_names for part in _PARTS[str(method)]}
        others = [name for name in self._checkpoint.tensors if name not in parts]
        state = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self._checkpoint.read_many(others).items()
        }
        architecture = ARCHITECTURES.get(self._checkpoint.model_type)
        transposed = architecture is not None and architecture.transposed
        for name in self.quantized_names:
            weight = self.as_loaded(name).to(dtype)
            state[f"{name}.weight"] = weight.T.contiguous() if transposed else weight
        return state


def open_reader(folder: Path) -> Reader | GgufReader:
    """The reader of a folder in any of our formats. Raises what the readers raise."""
    return GgufReader(folder) if open_checkpoint(folder).is_gguf else Reader(folder)
