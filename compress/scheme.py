"""What a weight is quantized to, and the one form of a quantized weight inside the program.

    dequantized[o, i] = (value(codes[o, i]) - zero_point[o, g]) * scale[o, g],   g = i // group_size

where value is the identity, except for nf4, whose codes are indices into a fixed table of 16 levels, and for
llm_int8, whose codes count 127ths.
Torch is never imported here: the plan and the recipe read the table of targets without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

PER_CHANNEL = -1
"""The group size that means one scale per output channel."""

Values = Literal["int", "float", "nf4", "llm_int8"]
Algorithm = Literal["gptq", "rtn"]

NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""NormalFloat with 4 bits, as float32: Dettmers et al., "QLoRA", arXiv 2305.14314, appendix E."""
LLM_INT8_UNIT = 7.874015718698502e-3
"""1 / 127 as bitsandbytes writes it: Dettmers et al., "LLM.int8()", arXiv 2208.07339, section 2.1."""
_NAMES: Mapping[Values, str] = {"float": "FP8", "nf4": "NF4", "llm_int8": "LLM.int8"}


@dataclass(frozen=True)
class Scheme:
    """How the weights of one linear layer are stored, and how its inputs are rounded at run time.

    Attributes:
        bits: width of a code, 4 or 8.
        values: what codes stand for: integers, 8-bit floating-point numbers (e4m3), levels of NF4, or 127ths of the
            scale, which is then a row's largest weight (LLM.int8).
        group_size: input columns that share a scale; PER_CHANNEL is one scale per output channel.
        symmetric: codes are centred on zero and there is no zero point.
        activation_bits: 8 when the layer's inputs are rounded per token at run time (W8A8), to the kind of number that
            `values` says, else None.
    """

    bits: Literal[4, 8]
    group_size: int
    symmetric: bool = True
    activation_bits: Literal[8] | None = None
    values: Values = "int"

    def groups(self, width: int) -> int:
        """Number of groups along an input of `width` columns."""
        return 1 if self.group_size == PER_CHANNEL else width // self.group_size

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest code; for NF4 its first and last level.

        Raises:
            ValueError: floating-point codes, which are no integers.
        """
        if self.values == "float":
            raise ValueError("floating-point codes have no range of integers")
        if self.values == "nf4":
            return 0, len(NF4_LEVELS) - 1
        if self.values == "llm_int8":
            return -127, 127
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    @property
    def label(self) -> str:
        """Short name for tables: `W4A16 g64`, `W8A8 channel`, `W4A16 g64 asymmetric`, `FP8 channel`, `NF4 g64`.

        Further: `LLM.int8 channel`.
        """
        grouping = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        named = _NAMES.get(self.values, f"W{self.bits}A{self.activation_bits or 16}")
        return f"{named} {grouping}{'' if self.symmetric else ' asymmetric'}"


@dataclass(frozen=True)
class Target:
    """One row of the table of targets: what `--target NAME` means.

    Attributes:
        name: as on the command line.
        formats: checkpoint formats that can hold it, the default first.
        cast: the dtype name for a plain cast ("float16", "bfloat16"), else None.
        bits: code width of a quantized target, else None.
        values: see Scheme.
        activation_bits: see Scheme.
        grouped: whether `--group-size` may be given.
        asymmetric: whether there may be zero points.
        default_group_size: "auto" (largest of 128, 64, 32 that fits every layer), PER_CHANNEL, or a fixed number.
        default_algorithm: "gptq" or "rtn"; None for casts.
        algorithms: all that can be asked for.
    """

    name: str
    formats: tuple[str, ...]
    cast: str | None = None
    bits: Literal[4, 8] | None = None
    values: Values = "int"
    activation_bits: Literal[8] | None = None
    grouped: bool = False
    asymmetric: bool = False
    default_group_size: Literal["auto"] | int = PER_CHANNEL
    default_algorithm: Algorithm | None = None
    algorithms: tuple[Algorithm, ...] = ("gptq", "rtn")


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("fp16", ("safetensors",), cast="float16"),
        Target("bf16", ("safetensors",), cast="bfloat16"),
        Target(
            "fp8",
            ("compressed-tensors",),
            bits=8,
            values="float",
            activation_bits=8,
            default_algorithm="rtn",
            algorithms=("rtn",),
        ),
        Target("int8", ("compressed-tensors",), bits=8, activation_bits=8, default_algorithm="rtn"),
        Target(
            "int8-weight",
            ("compressed-tensors", "gptq", "gptq_v2", "gguf"),
            bits=8,
            grouped=True,
            asymmetric=True,
            default_algorithm="rtn",
        ),
        Target(
            "int4",
            ("compressed-tensors", "gptq", "gptq_v2", "gguf"),
            bits=4,
            grouped=True,
            asymmetric=True,
            default_group_size="auto",
            default_algorithm="gptq",
        ),
        Target(
            "nf4",
            ("bitsandbytes",),
            bits=4,
            values="nf4",
            default_group_size=64,
            default_algorithm="rtn",
            algorithms=("rtn",),
        ),
        Target(
            "int8-bnb",
            ("bitsandbytes",),
            bits=8,
            values="llm_int8",
            activation_bits=8,
            default_algorithm="rtn",
            algorithms=("rtn",),
        ),
    )
}
UNCHANGED = Target("unchanged", ("safetensors",))
"""Of recipes that do not quantize: every weight keeps its dtype."""
AUTO_GROUP_SIZES = (128, 64, 32)
FORMAT_GROUP_SIZES: Mapping[str, tuple[int, ...]] = {"gguf": (32,)}
"""Group sizes of formats that fix them; "auto" and the target's own become the first."""


@dataclass(frozen=True)
class QuantizedWeight:
    """The only form of a quantized layer inside the program.

    Attributes:
        codes: [out, in]. int8 for integers, signed and within `scheme.code_range`; int8 0 to 15 for nf4;
            float8_e4m3fn for floats.
        scale: [out, groups], finite and positive, already in the dtype it is stored in.
        zero_point: int8 [out, groups], within `scheme.code_range`, or None when symmetric.
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
        values = self._values(dtype).reshape(out, groups, width // groups)
        if self.zero_point is not None:
            values = values - self.zero_point.to(dtype).unsqueeze(-1)
        dense = (values * self.scale.to(dtype).unsqueeze(-1)).reshape(out, width)
        # Last, as in bitsandbytes: the order of two products decides the last bit.
        return dense * LLM_INT8_UNIT if self.scheme.values == "llm_int8" else dense

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        if self.scheme.values != "nf4":
            return self.codes.to(dtype)
        return self.codes.new_tensor(NF4_LEVELS, dtype=dtype)[self.codes.int()]
