from __future__ import annotations

import numpy as np
import pytest
import torch

from compress.formats import pack


def random_codes(out: int, width: int, bits: int, seed: int = 0) -> torch.Tensor:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (out, width), generator=generator, dtype=torch.int8)


def as_int32(word: int) -> int:
    return int(np.array(word, dtype=np.uint32).view(np.int32))


def slow_rows(values: list[list[int]], bits: int) -> list[list[int]]:
    """Word r of column c holds values[r * per + j][c] at bit `bits * j`."""
    per = 32 // bits
    rows = []
    for start in range(0, len(values), per):
        chunk = values[start : start + per]
        rows.append(
            [as_int32(sum(line[c] << (bits * j) for j, line in enumerate(chunk))) for c in range(len(values[0]))]
        )
    return rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out", "width"), [(1, 8), (8, 32), (16, 64), (7, 20), (5, 3)])
def test_gptq_words_equal_the_slow_reference(bits, out, width):
    codes = random_codes(out, width, bits)
    unsigned = [[int(codes[o, i]) + 2 ** (bits - 1) for o in range(out)] for i in range(width)]
    packed = pack.gptq_qweight(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.is_contiguous()
    assert packed.tolist() == slow_rows(unsigned, bits)


@pytest.mark.parametrize(("bits", "word"), [(4, 0x77777777), (8, 0x7F7F7F7F)])
def test_symmetric_zero_points_are_stored_minus_one(bits, word):
    assert pack.gptq_qzeros(torch.zeros(64, 2, dtype=torch.int8), bits, 1).tolist() == [[word] * (64 * bits // 32)] * 2


def test_zero_points_of_a_ragged_last_word_stay_in_it():
    assert pack.gptq_qzeros(torch.zeros(10, 1, dtype=torch.int8), 4, 1).tolist() == [[0x77777777, 0x77]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [40, 64, 3])
def test_compressed_tensors_words_equal_the_slow_reference(bits, width):
    codes = random_codes(16, width, bits)
    packed = pack.signed_to_int32(codes, bits)
    expected = slow_rows((codes.T.int() + 2 ** (bits - 1)).tolist(), bits)
    assert torch.equal(packed, torch.tensor(expected, dtype=torch.int32).T)
    assert torch.equal(pack.int32_to_signed(packed, bits, (16, width)), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_codes_do_not_spill_into_neighbours(bits):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes = torch.tensor([[low, high] * 32], dtype=torch.int8)
    word = sum(((2**bits - 1) if lane % 2 else 0) << (bits * lane) for lane in range(32 // bits))
    assert set(pack.gptq_qweight(codes, bits).flatten().tolist()) == {as_int32(word)}
    assert torch.equal(pack.int32_to_signed(pack.signed_to_int32(codes, bits), bits, (1, 64)), codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [1, 3, 31, 40, 64])
def test_words_are_those_of_the_library(bits: int, width: int) -> None:
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    for codes in (random_codes(16, width, bits), random_codes(width, 16, bits).T):
        assert torch.equal(pack.signed_to_int32(codes, bits), pack_to_int32(codes.contiguous(), bits))
