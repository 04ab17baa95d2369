"""The independent reader: a folder of ours back into quantized weights, or into a dense model's tensors.

The gptq side is written from the description of the format (GPTQModel, `qlinear/__init__.py` and
`utils/model.py`; AutoGPTQ, `qlinear_cuda_old.py`) and shares no code with the packing, so that agreement of
the two is a proof:

    code(i, o)  = (qweight[i * bits // 32, o] >> (i * bits % 32)) & (2^bits - 1)                   0 <= i < in
    zero(g, o)  = ((qzeros[g, o * bits // 32] >> (o * bits % 32)) & (2^bits - 1)) + 1              version 1
    weight(o,i) = scales[g_idx[i], o] * (code(i, o) - zero(g_idx[i], o))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from compress.errors import BrokenResultError
from compress.formats import compressed_tensors, gptq, gptq_check
from compress.model.architectures import ARCHITECTURES
from compress.model.checkpoint import open_checkpoint
from compress.scheme import QuantizedWeight, Scheme

_PARTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
}
_MARK = {"compressed-tensors": "weight_scale", "gptq": "qweight"}
"""The part that every quantized layer has and no other one."""
_LISTED = 20

Words = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.int16]


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
        ending = f".{_MARK[self._method]}" if self._method is not None else None
        self.quantized_names: tuple[str, ...] = tuple(
            name.removesuffix(ending) for name in self._checkpoint.tensors if ending and name.endswith(ending)
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
        group = _group_of(self._config["config_groups"], name)
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
                return unpack_gptq(name, scheme, tensors)
            return compressed_tensors.unpack(scheme, tensors)
        except KeyError as error:
            raise BrokenResultError(f"{name}: tensor {error.args[0]} is missing.") from error
        except (RuntimeError, ValueError) as error:
            raise BrokenResultError(f"{name}: its tensors do not fit {scheme.label}: {error}") from error

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
            weight = self.quantized(name).dequantize(torch.float32).to(dtype)
            state[f"{name}.weight"] = weight.T.contiguous() if transposed else weight
        return state


def unpack_gptq(name: str, scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """The quantized weight that gptq tensors (version 1) stand for.

    Args:
        tensors: qweight int32 [ceil(in * bits / 32), out], qzeros int32 [groups, ceil(out * bits / 32)],
            scales [groups, out], g_idx int32 [in].

    Raises:
        BrokenResultError: columns out of group order, or a zero point that a symmetric layer cannot have.
    """
    groups, out = tensors["scales"].shape
    width = tensors["g_idx"].shape[0]
    order = np.repeat(np.arange(groups), width // groups)
    if groups != scheme.groups(width) or not np.array_equal(tensors["g_idx"].numpy(), order):
        raise BrokenResultError(f"{name}: g_idx does not describe {scheme.label} in the order of the columns.")
    codes = _bits_at(_words(tensors["qweight"]).T, width, scheme.bits)  # [out, in]
    zeros = _bits_at(_words(tensors["qzeros"]), out, scheme.bits) + 1  # [groups, out]
    middle = 1 << (scheme.bits - 1)
    if codes.shape != (out, width) or zeros.shape != (groups, out) or (zeros != middle).any():
        raise BrokenResultError(f"{name}: qweight or qzeros do not fit a symmetric layer of {scheme.bits} bits.")
    signed = torch.from_numpy((codes - middle).astype(np.int8))
    return QuantizedWeight(signed, tensors["scales"].T.contiguous(), None, scheme)


def _words(tensor: torch.Tensor) -> Words:
    return tensor.numpy().view(np.uint32)


def _bits_at(words: Words, count: int, bits: int) -> Codes:
    """The first `count` fields of `bits` bits in each row of [n, words], lowest bits first: [n, count]."""
    position = np.arange(count) * bits
    fields = words[:, position // 32] >> (position % 32).astype(np.uint32)
    return (fields & np.uint32((1 << bits) - 1)).astype(np.int16)


def _group_of(groups: Mapping[str, Any], name: str) -> Any:
    """The config group of a layer: by its name, then by a pattern, then by its class."""
    for applies in (_names, _matches, lambda target, _name: target == "Linear"):
        for group in groups.values():
            if any(applies(target, name) for target in group["targets"]):
                return group
    return None


def _names(target: str, name: str) -> bool:
    """The file may lack the base model's prefix, or have one that the class lacks."""
    return target == name or target.endswith(f".{name}") or name.endswith(f".{target}")


def _matches(target: str, name: str) -> bool:
    return target.startswith("re:") and re.match(target.removeprefix("re:"), name) is not None
