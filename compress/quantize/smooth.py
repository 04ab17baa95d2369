"""Factors per input channel that make a group of layers easier to round, folded into what produces their input.

W x = (W s)(x / s) for any s > 0 per input channel. Where few channels of x are far larger than the others, dividing
them by s > 1 leaves the others more of the int8 range of a token, and the weights, which have room, take the factor
over. The family of factors is that of SmoothQuant (Xiao et al., arXiv 2211.10438, eq. 4),

    s_i = spread(x_i)^alpha / spread(W_i)^(1 - alpha),     spread: the largest magnitude, or the root mean square,

and, where inputs are not rounded, that of AWQ (Lin et al., arXiv 2306.00978, eq. 4), s_i = spread(x_i)^(alpha / 2).
Which one is taken, or none, is decided by the measured error of the group's outputs on calibration tokens.

What takes the factors over is stored in 16 bits and rounds, so the factor that counts is the one it really took:
w / w' for a norm's weight w and what was stored, and the same for the scale of a quantized row, whose codes stay. Only
biases are rounded on top of that. Where one factor must hold for several numbers (rows of floating weights, rows with
many scales), it is rounded to a power of two, which divides all of them exactly. Channels where none of this works
(zeros, underflow) keep the factor 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from compress.scheme import QuantizedWeight

Spread = Literal["rms", "largest"]

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Half of it where inputs are not rounded: factors that help rounding to nearest help GPTQ only in part."""
SPREADS: tuple[Spread, ...] = ("rms", "largest")
LARGEST_EXPONENT = 8
"""Factors stay within 2^-8 .. 2^8: a channel that calibration hardly saw must not become an outlier later."""
FURTHEST_FROM_PLAN = 1.5
"""How far rounding may move a factor before the channel is left as it is: more than a power of two is away."""


@dataclass(frozen=True)
class Folded:
    """A producer that has taken factors over.

    Attributes:
        s: float32 [channels], the factors that it really took.
        weight: norm weight [channels]; rows [out, in], or the quantized layer with the codes that it had before.
        bias: of all rows; None where there is none.
    """

    s: torch.Tensor
    weight: torch.Tensor | QuantizedWeight
    bias: torch.Tensor | None


Fold = Callable[[torch.Tensor], Folded]
"""From wanted factors, float32 [channels], to the producer that took them over; `folded_norm`, `folded_rows`."""


@dataclass(frozen=True)
class Smoothing:
    """What was chosen for one group.

    Attributes:
        s: float32 [in]: quantize W * s, and expect inputs x / s.
        folded: the producer; None where no factors were better than none.
        spread, alpha: the member of the family; None with `folded`.
        error_before, error_after: relative output error without factors and with them, see `_Error`.
    """

    s: torch.Tensor
    folded: Folded | None
    spread: Spread | None
    alpha: float | None
    error_before: float
    error_after: float


def smooth_group(
    X: torch.Tensor,
    weights: Sequence[torch.Tensor],
    fold: Fold,
    quantize: Callable[[torch.Tensor], torch.Tensor],
    *,
    channels: torch.Tensor | None,
    activation_bits: int | None,
) -> Smoothing:
    """Chooses the factors of a group of layers with a common input by the error of its outputs.

    Args:
        X: [tokens, in], a sample of calibration inputs spread over all windows, first tokens of windows included.
        weights: float32 [out, in] of each layer.
        quantize: the weight that a layer computes with once it is quantized, from the weight; both [out, in].
        channels: int64 [in], the producer's channel of each input; None where they are the same.
        activation_bits: 8 where the layers' inputs are rounded per token at run time, else None.
    """
    X = X.float()
    error = _Error(X, weights, quantize, activation_bits)
    one = torch.ones(X.shape[1], device=X.device)
    best = Smoothing(one, None, None, None, before := error.of(one), before)
    for spread, alpha, wanted in candidates(X, weights, channels, activation_bits):
        folded = fold(wanted)
        s = folded.s if channels is None else folded.s[channels]
        found = error.of(s)
        if found < best.error_after:
            best = Smoothing(s, folded, spread, alpha, before, found)
    return best


def sampled(inputs: torch.Tensor, rows: int, turn: int) -> torch.Tensor:
    """At most `rows` tokens [rows, in] of a window's inputs [..., T, in], evenly spread.

    Windows take turns in where they begin: one in `rows` shows its first token, where the largest outliers live: often
    enough to be seen, not so often that it decides.
    """
    X = inputs.reshape(-1, inputs.shape[-1])
    rows = min(rows, len(X))
    if not rows:
        return X.float()  # an expert that no token of the window was sent to
    at = (torch.arange(rows, device=X.device, dtype=torch.float64) + (turn % rows) / rows) * (len(X) / rows)
    return X[at.long()].float()


def candidates(
    X: torch.Tensor, weights: Sequence[torch.Tensor], channels: torch.Tensor | None, activation_bits: int | None
) -> Iterator[tuple[Spread, float, torch.Tensor]]:
    """(spread, alpha, factors [channels]) with a geometric mean near 1; 1 for channels never used.

    Inputs that share a channel (grouped-query attention) get the geometric mean of their factors.
    """
    W = torch.cat([weight.float() for weight in weights])  # [sum of out, in]
    for spread in SPREADS:
        x, w = _spread(X, spread), _spread(W, spread)
        used = (x > 0) & (w > 0)
        log_x, log_w = (torch.where(used, side, 1.0).log2() for side in (x, w))
        for alpha in ALPHAS:
            exponent = alpha / 2 * log_x if activation_bits is None else alpha * log_x - (1 - alpha) * log_w
            exponent = torch.where(used, exponent - exponent[used].mean(), 0.0) if bool(used.any()) else exponent
            shared = exponent if channels is None else _mean_by(channels, exponent)
            yield spread, alpha, torch.exp2(shared.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT))


def _spread(values: torch.Tensor, spread: Spread) -> torch.Tensor:
    """Of each column of [n, in]."""
    return values.abs().amax(dim=0) if spread == "largest" else values.square().mean(dim=0).sqrt()


def _mean_by(channels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mean of the values [in] of each channel; every channel has inputs."""
    sums = torch.zeros(int(channels.max()) + 1, device=values.device).index_add_(0, channels, values)
    return sums / torch.bincount(channels)


class _Error:
    """Output error of a group under factors, a mean of relative errors over layers and tokens.

        sum_layers sum_t c_t || Q(W s) round(x_t / s) - y_t ||^2  /  sum_layers sum_t c_t || y_t ||^2,     y_t = W x_t

    with c_t = 1 / (||y_t||^2 + median ||y||^2) for each layer: neither the layer with the largest outputs shall decide
    alone, nor the few tokens whose outputs are a thousand times larger than the rest and which the next norm divides.
    """

    def __init__(
        self,
        X: torch.Tensor,
        weights: Sequence[torch.Tensor],
        quantize: Callable[[torch.Tensor], torch.Tensor],
        activation_bits: int | None,
    ) -> None:
        self._X, self._weights, self._quantize, self._bits = X, weights, quantize, activation_bits
        self._outputs = [X @ W.T for W in weights]
        energies = [Y.square().sum(dim=1) for Y in self._outputs]  # [tokens] each
        tiny = torch.finfo(torch.float32).tiny
        self._shares = [1 / (energy + energy.median()).clamp_min(tiny) for energy in energies]
        self._signal = sum(float((c * energy).sum()) for c, energy in zip(self._shares, energies, strict=True))

    def of(self, s: torch.Tensor) -> float:
        inputs = self._X / s
        if self._bits is not None:
            inputs = rounded_per_token(inputs, self._bits)
        total = 0.0
        for W, Y, c in zip(self._weights, self._outputs, self._shares, strict=True):
            wrong = inputs @ self._quantize(W * s).T - Y
            total += float((c * wrong.square().sum(dim=1)).sum())
        return total / self._signal if self._signal > 0 else 0.0


def rounded_per_token(X: torch.Tensor, bits: int) -> torch.Tensor:
    """Inputs [tokens, in] as engines round them: symmetric, one scale per token, 2 max|x| / (2^bits - 1)."""
    scale = X.abs().amax(dim=-1, keepdim=True) / ((2**bits - 1) / 2)
    scale = torch.where(scale == 0, 1.0, scale)
    return (X / scale).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).mul_(scale)


def folded_norm(s: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, plus_one: bool) -> Folded:
    """A norm whose outputs are divided by s [channels]; dtypes stay. Channels that multiply by zero keep 1.

    Args:
        weight, bias: [channels]; with plus_one the norm multiplies by 1 + weight and has no bias.
    """
    offset = 1.0 if plus_one else 0.0
    factor = weight.float() + offset
    stored = (factor / s - offset).to(weight.dtype)
    s, near = _taken(s, factor, stored.float() + offset)
    return Folded(s, torch.where(near, stored, weight), None if bias is None else _divided(bias, s))


def folded_rows(
    s: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, *, first_row: int = 0
) -> Folded:
    """A linear layer whose rows first_row .. first_row + len(s) are divided by s; dtypes and codes stay.

    Args:
        weight: [out, in], or the quantized layer: only its scales change.
        bias: [out].
    """
    values = weight.scale if isinstance(weight, QuantizedWeight) else weight
    whole = torch.ones(values.shape[0], device=values.device)
    whole[first_row : first_row + len(s)] = s
    if values.shape[1] > 1:
        whole = torch.exp2(whole.log2().round())
        exact = (_divided(values, whole.unsqueeze(1)).float() * whole.unsqueeze(1) == values.float()).all(dim=1)
        whole = torch.where(exact, whole, 1.0)
        stored = _divided(values, whole.unsqueeze(1))
    else:
        divided = _divided(values, whole.unsqueeze(1))  # [out, 1]
        whole, near = _taken(whole, values[:, 0].float(), divided[:, 0].float())
        stored = torch.where(near.unsqueeze(1), divided, values)
    taken = whole[first_row : first_row + len(s)]
    replaced = replace(weight, scale=stored) if isinstance(weight, QuantizedWeight) else stored
    return Folded(taken, replaced, None if bias is None else _divided(bias, whole))


def _taken(s: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors that numbers took over which were to be before / s and became after; and where they did."""
    taken = before / after
    near = taken.isfinite() & (taken < s * FURTHEST_FROM_PLAN) & (taken * FURTHEST_FROM_PLAN > s) & (s != 1)
    return torch.where(near, taken, 1.0), near


def _divided(values: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (values.float() / s).to(values.dtype)
