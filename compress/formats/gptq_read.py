"""The independent reader of gptq tensors.

Written from the description of the format (GPTQModel, `qlinear/__init__.py` and `utils/model.py`; AutoGPTQ,
`qlinear_cuda_old.py`); it shares no code with the packing, so that agreement of the two is a proof:

    code(i, o)  = (qweight[i * bits // 32, o] >> (i * bits % 32)) & (2^bits - 1)                   0 <= i < in
    zero(g, o)  = (qzeros[g, o * bits // 32] >> (o * bits % 32)) & (2^bits - 1)                    version 2
    zero(g, o)  = the same + 1, modulo 2^bits                                                      version 1
    weight(o,i) = scales[g_idx[i], o] * (code(i, o) - zero(g_idx[i], o))

A field of 3 bits may begin in one word and end in the next one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from compress.errors import BrokenResultError
from compress.scheme import QuantizedWeight, Scheme

PARTS = ("qweight", "qzeros", "scales", "g_idx")
MARKS = ("qweight",)
VERSIONS = {"gptq": 1, "gptq_v2": 2}
"""By the value of `checkpoint_format`."""

Words = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.int16]


def unpack(name: str, scheme: Scheme, tensors: Mapping[str, torch.Tensor], version: int) -> QuantizedWeight:
    """The quantized weight that the tensors of one layer stand for.

    Args:
        tensors: qweight int32 [ceil(in * bits / 32), out], qzeros int32 [groups, ceil(out * bits / 32)],
            scales [groups, out], g_idx int32 [in].

    Raises:
        BrokenResultError: columns out of group order, or a zero point that a symmetric layer cannot have.
        KeyError: a tensor is missing.
    """
    groups, out = tensors["scales"].shape
    width = tensors["g_idx"].shape[0]
    order = np.repeat(np.arange(groups), width // groups)
    if groups != scheme.groups(width) or not np.array_equal(tensors["g_idx"].numpy(), order):
        raise BrokenResultError(f"{name}: g_idx does not describe {scheme.label} in the order of the columns.")
    codes = fields(words(tensors["qweight"]).T, width, scheme.bits)  # [out, in]
    zeros = zero_points(tensors["qzeros"], out, scheme.bits, version)  # [groups, out]
    middle = 1 << (scheme.bits - 1)
    if codes.shape != (out, width) or zeros.shape != (groups, out) or (scheme.symmetric and (zeros != middle).any()):
        raise BrokenResultError(f"{name}: qweight or qzeros do not fit {scheme.label}.")
    zero_point = None if scheme.symmetric else _signed(zeros.T, middle)
    return QuantizedWeight(_signed(codes, middle), tensors["scales"].T.contiguous(), zero_point, scheme)


def zero_points(qzeros: torch.Tensor, out: int, bits: int, version: int) -> Codes:
    """Unsigned zero points [groups, out]."""
    stored = fields(words(qzeros), out, bits)
    return (stored + 1) & ((1 << bits) - 1) if version == 1 else stored


def words(tensor: torch.Tensor) -> Words:
    return tensor.numpy().view(np.uint32)


def fields(packed: Words, count: int, bits: int) -> Codes:
    """The first `count` fields of `bits` bits in each row of [n, words], lowest bits first: [n, count].

    Raises:
        ValueError: the words do not hold exactly so many fields.
    """
    if packed.shape[1] != -(-count * bits // 32):
        raise ValueError(f"{packed.shape[1]} words for {count} fields of {bits} bits")
    first = np.arange(count) * bits
    last = np.minimum(first // 32 + 1, packed.shape[1] - 1)
    both = packed[:, first // 32].astype(np.uint64) | packed[:, last].astype(np.uint64) << np.uint64(32)
    return (both >> (first % 32).astype(np.uint64) & np.uint64((1 << bits) - 1)).astype(np.int16)


def _signed(unsigned: Codes, middle: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(unsigned - middle).astype(np.int8))
