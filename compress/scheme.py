"""What a weight is quantized to, and the one form of a quantized weight inside the program.

    dequantized[o, i] = (codes[o, i] - zero_point[o, g]) * scale[o, g],   g = i // group_size

Torch is never imported here: the plan and the recipe read the table of targets without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

PER_CHANNEL = -1
"""The group size that means one scale per output channel."""


@dataclass(frozen=True)
class Scheme:
    """How the weights of one linear layer are stored, and how its inputs are rounded at run time.

    Attributes:
        bits: width of a code, 4 or 8.
        group_size: input columns that share a scale; PER_CHANNEL is one scale per output channel.
        symmetric: codes are centred on zero and there is no zero point.
        activation_bits: 8 when the layer's inputs are rounded to int8 per token at run time (W8A8), else None.
    """

    bits: Literal[4, 8]
    group_size: int
    symmetric: bool = True
    activation_bits: Literal[8] | None = None

    def groups(self, width: int) -> int:
        """Number of groups along an input of `width` columns."""
        return 1 if self.group_size == PER_CHANNEL else width // self.group_size

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest signed code."""
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    @property
    def label(self) -> str:
        """Short name for tables: `W4A16 g64`, `W8A8 channel`."""
        grouping = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        return f"W{self.bits}A{self.activation_bits or 16} {grouping}"


@dataclass(frozen=True)
class Target:
    """One row of the table of targets: what `--target NAME` means.

    Attributes:
        cast: the dtype name for a plain cast ("float16", "bfloat16"), else None.
        bits: code width of a quantized target, else None.
        activation_bits: see Scheme.
        formats: checkpoint formats that can hold it, the default first.
        grouped: whether `--group-size` may be given.
        default_group_size: "auto" (largest of 128, 64, 32 that fits every layer) or PER_CHANNEL.
        default_algorithm: "gptq" or "rtn"; None for casts.
    """

    name: str
    formats: tuple[str, ...]
    cast: str | None = None
    bits: Literal[4, 8] | None = None
    activation_bits: Literal[8] | None = None
    grouped: bool = False
    default_group_size: Literal["auto"] | int = PER_CHANNEL
    default_algorithm: Literal["gptq", "rtn"] | None = None


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("fp16", ("safetensors",), cast="float16"),
        Target("bf16", ("safetensors",), cast="bfloat16"),
        Target("int8", ("compressed-tensors",), bits=8, activation_bits=8, default_algorithm="rtn"),
        Target("int8-weight", ("compressed-tensors", "gptq"), bits=8, grouped=True, default_algorithm="rtn"),
        Target(
            "int4",
            ("compressed-tensors", "gptq"),
            bits=4,
            grouped=True,
            default_group_size="auto",
            default_algorithm="gptq",
        ),
    )
}
AUTO_GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class QuantizedWeight:
    """The only form of a quantized layer inside the program.

    Attributes:
        codes: int8 [out, in], signed, within `scheme.code_range`.
        scale: [out, groups], finite and positive, already in the dtype it is stored in.
        zero_point: int8 [out, groups], or None when symmetric.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [out, in] that this object stands for, computed in `dtype`.

        In float32 the product is exact for 16-bit scales: 8-bit codes times an 11-bit mantissa.
        """
        out, width = self.codes.shape
        groups = self.scale.shape[1]
        codes = self.codes.to(dtype).reshape(out, groups, width // groups)
        if self.zero_point is not None:
            codes = codes - self.zero_point.to(dtype).unsqueeze(-1)
        return (codes * self.scale.to(dtype).unsqueeze(-1)).reshape(out, width)
