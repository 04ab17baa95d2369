"""The two roundings of bitsandbytes, code for code as the library chooses them on a CPU.

Written here because the weights must come out in this program's own form, and so that they do not depend on the
version of the library; a test compares the two.
"""

from __future__ import annotations

import torch

from compress.errors import BrokenResultError
from compress.scheme import NF4_LEVELS, QuantizedWeight, Scheme

_SMALLEST_DIVISOR = 1e-38
_LARGEST_CODE = 127.0


def quantize_nf4(W: torch.Tensor, scheme: Scheme) -> QuantizedWeight:
    """The nearest NF4 level of w / max|w| in every block: `bitsandbytes.functional.quantize_4bit`.

    Scales are the blocks' largest magnitudes in float32. A block of zeros gets scale 1, where the library stores 0.

    Args:
        W: float32 [out, in]; in is a multiple of the group size.
    """
    out, width = W.shape
    blocks = W.reshape(out, scheme.groups(width), -1)
    largest = blocks.abs().amax(dim=-1)  # [out, groups]
    shares = (blocks * (1.0 / largest.clamp(min=_SMALLEST_DIVISOR)).unsqueeze(-1)).clamp_(-1, 1)
    levels = torch.tensor(NF4_LEVELS, device=W.device)
    codes = torch.bucketize(shares, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.int8)
    return QuantizedWeight(codes.reshape(out, width), _positive(largest), None, scheme)


def quantize_llm_int8(W: torch.Tensor, scheme: Scheme) -> QuantizedWeight:
    """round(127 w / max|w|) in every row, all in float16 as far as the library does so: `int8_vectorwise_quant`.

    A row of zeros gets scale 1, where the library stores 0.

    Args:
        W: float32 [out, in], see `check_half`.
    """
    half = W.to(torch.float16)
    largest = half.abs().amax(dim=1, keepdim=True).float()  # [out, 1]
    scale = _positive(largest)
    codes = torch.round(half * (_LARGEST_CODE / scale)).to(torch.int8)
    return QuantizedWeight(codes, scale, None, scheme)


def check_half(name: str, W: torch.Tensor) -> None:
    """Raises BrokenResultError if a weight is too large for float16, to which LLM.int8 rounds first."""
    largest = float(W.abs().max())
    if largest > torch.finfo(torch.float16).max:
        raise BrokenResultError(
            f"{name}: LLM.int8 rounds weights to float16 first, and {largest:.4g} is too large for that.",
            hint="Use --target int8-weight, or leave the layer alone with skip.",
        )


def _positive(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest == 0, 1.0, largest)
