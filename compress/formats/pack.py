"""Codes packed into int32 words. Pure functions of tensors; nothing here rounds.

Both layouts put the first code into the lowest bits. They differ in axis and in zero point:

    gptq                 qweight: unsigned codes along the input, [in, out] -> [words(in), out]
                         qzeros:  unsigned zero points along the output, [groups, out] -> [groups, words(out)];
                                  version 1 stores each of them less 1
    compressed-tensors   codes + 2^(bits-1) along the input, [out, in] -> [out, words(in)]
                         zero points + 2^(bits-1) along the output, [out, groups] -> [words(out), groups]

with words(n) = ceil(n * bits / 32).

The inverse of the gptq layout stands in `formats/read.py`, written from the description of the format alone.
"""

from __future__ import annotations

from typing import Literal

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


def gptq_qzeros(zero_points: torch.Tensor, bits: int, version: Literal[1, 2]) -> torch.Tensor:
    """Signed zero points int8 [out, groups] -> qzeros int32 [groups, ceil(out * bits / 32)].

    Raises:
        ValueError: version 1, which stores zero points less 1, has no bits for the lowest one.
    """
    unsigned = zero_points.T.to(torch.int32) + 2 ** (bits - 1)
    stored = unsigned - 1 if version == 1 else unsigned
    if bool((stored < 0).any()):
        raise ValueError("version 1 of gptq cannot store a zero point of 0")
    return pack_columns(stored, bits)


def signed_to_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes int8 [out, in] -> int32 [out, ceil(in * bits / 32)], in compressed-tensors' layout."""
    unsigned = codes ^ -128 if bits == 8 else codes + 2 ** (bits - 1)
    unsigned = functional.pad(unsigned, (0, -codes.shape[1] % (WORD // bits)))
    if bits == 4:
        pairs = unsigned.contiguous().view(torch.int16)
        unsigned = (pairs | pairs >> 4).to(torch.uint8)  # the upper byte, which is cut off, had the second code
    return unsigned.contiguous().view(torch.int32)


def int32_to_signed(packed: torch.Tensor, bits: int, shape: tuple[int, int]) -> torch.Tensor:
    """The inverse of `signed_to_int32`: int8 of `shape`."""
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    codes: torch.Tensor = unpack_from_int32(packed, bits, torch.Size(shape))
    return codes.contiguous()


def zeros_to_int32(zero_points: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed zero points int8 [out, groups] -> int32 [ceil(out * bits / 32), groups], in compressed-tensors' layout."""
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    packed: torch.Tensor = pack_to_int32(zero_points, bits, packed_dim=0)
    return packed.contiguous()


def int32_to_zeros(packed: torch.Tensor, bits: int, shape: tuple[int, int]) -> torch.Tensor:
    """The inverse of `zeros_to_int32`: int8 of `shape`."""
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    zero_points: torch.Tensor = unpack_from_int32(packed, bits, torch.Size(shape), packed_dim=0)
    return zero_points.contiguous()
