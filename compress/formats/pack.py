"""Codes packed into int32 words. Pure functions of tensors; nothing here rounds.

Both layouts put the first code into the lowest bits. They differ in axis and in zero point:

    gptq, version 1      qweight: unsigned codes along the input, [in, out] -> [words(in), out]
                         qzeros:  zero point - 1 along the output, [groups, out] -> [groups, words(out)]
    compressed-tensors   codes + 2^(bits-1) along the input, [out, in] -> [out, words(in)]

with words(n) = ceil(n * bits / 32).

The inverse of the gptq layout stands in `formats/read.py`, written from the description of the format alone.
"""

from __future__ import annotations

import torch
from torch.nn import functional

WORD = 32


def pack_rows(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs unsigned integers [n, m] along n: -> int32 [ceil(n * bits / 32), m]. `bits` must divide 32.

    Row r holds values r * (32 / bits) + j at bit `bits * j`; missing values at the end are 0.
    """
    per_word = WORD // bits
    count, columns = values.shape
    padded = functional.pad(values.to(torch.int32), (0, 0, 0, -count % per_word))
    lanes = padded.reshape(-1, per_word, columns)  # [words, per_word, m]
    words = torch.zeros(lanes.shape[0], columns, dtype=torch.int32, device=values.device)
    for lane in range(per_word):
        words |= lanes[:, lane] << (bits * lane)
    return words


def pack_columns(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs unsigned integers [n, m] along m: -> int32 [n, ceil(m * bits / 32)]."""
    return pack_rows(values.T, bits).T.contiguous()


def gptq_qweight(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes int8 [out, in] -> qweight int32 [ceil(in * bits / 32), out]."""
    return pack_rows((codes.to(torch.int32) + 2 ** (bits - 1)).T, bits)


def gptq_qzeros(groups: int, out: int, bits: int) -> torch.Tensor:
    """qzeros of a symmetric layer, int32 [groups, ceil(out * bits / 32)]: version 1 stores 2^(bits-1) - 1."""
    return pack_columns(torch.full((groups, out), 2 ** (bits - 1) - 1), bits)


def signed_to_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes int8 [out, in] -> int32 [out, ceil(in * bits / 32)], in compressed-tensors' layout."""
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    packed: torch.Tensor = pack_to_int32(codes, bits)
    return packed.contiguous()


def int32_to_signed(packed: torch.Tensor, bits: int, shape: tuple[int, int]) -> torch.Tensor:
    """The inverse of `signed_to_int32`: int8 of `shape`."""
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    codes: torch.Tensor = unpack_from_int32(packed, bits, torch.Size(shape))
    return codes.contiguous()
