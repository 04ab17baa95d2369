"""What calibration tells an output projection: sums over tokens, and the output error that follows from them.

Letters, for each token: x and x^ [in] are the projection's input in the original and in the pruned model, r and r^
[out] what its output is added to there. W [out, in] is the original weight. What is missing at the sum if the pruned
model keeps W is the lag W (x - x^) of its inputs and the drift r - r^ of the residual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

ROWS = 2048  # that one product takes at least: more of them cost less, and float32 holds their sum
LARGEST_WEIGHT = 10.0  # times the median of a window's tokens, where tokens have weights
POST_NORM = frozenset({"gemma2", "gemma3_text", "olmo2"})
"""Model types with a norm between an output projection and the sum that its output goes into."""


@dataclass(frozen=True)
class Statistics:
    """Means over tokens, float64; with token weights w, sums of w ... over the sum of w.

    Attributes:
        C: [in, in], E[x^ x^T].
        lag: [out, in], E[W (x - x^) x^T].
        drift: [out, in], E[(r - r^) x^T]; None where no residual is known.
        mean_input: [in], E[x^].
        mean_lag, mean_drift: [out].
        lag_energy, missing_energy: E||W (x - x^)||^2, and E||W (x - x^) + r - r^||^2.
        weight: sum of w.
        tokens: number of tokens behind them.
    """

    C: torch.Tensor
    lag: torch.Tensor
    drift: torch.Tensor | None
    mean_input: torch.Tensor
    mean_lag: torch.Tensor
    mean_drift: torch.Tensor
    lag_energy: float
    missing_energy: float
    weight: float
    tokens: int

    @property
    def finite(self) -> bool:
        return all(bool(torch.isfinite(one).all()) for one in (self.C, self.lag, self.drift) if one is not None)

    @property
    def missing(self) -> torch.Tensor:
        """[out, in], E[(W (x - x^) + r - r^) x^T]."""
        return self.lag if self.drift is None else self.lag + self.drift

    def centred(self) -> Statistics:
        """Covariances in place of second moments: what a fit with a free bias goes by. The energies stay."""
        mu = self.mean_input
        drift = None if self.drift is None else self.drift - torch.outer(self.mean_drift, mu)
        return replace(self, C=self.C - torch.outer(mu, mu), lag=self.lag - torch.outer(self.mean_lag, mu), drift=drift)

    def output_energy(self, W: torch.Tensor) -> float:
        """E||W x||^2 of the original; W float64 [out, in]."""
        return float(((W @ self.C) * W).sum() + 2 * (W * self.lag).sum()) + self.lag_energy

    def error(self, W: torch.Tensor, changed: torch.Tensor, shift: torch.Tensor | None = None) -> float:
        """E||(r + W x) - (r^ + W' x^ + shift)||^2 with W' = `changed`, float64 [out, in].

        Args:
            shift: [out], what is added to the bias; None for nothing.
        """
        D = W - changed
        error = self.missing_energy + float(((D @ self.C) * D).sum() + 2 * (D * self.missing).sum())
        if shift is not None:
            offset = self.mean_lag + self.mean_drift + D @ self.mean_input
            error += float(shift @ shift - 2 * (shift @ offset))
        return max(error, 0.0)


def merged(one: Statistics, other: Statistics) -> Statistics:
    """Means over the tokens of both."""
    share = other.weight / ((one.weight + other.weight) or 1.0)
    drift = None if one.drift is None or other.drift is None else torch.lerp(one.drift, other.drift, share)
    return Statistics(
        C=torch.lerp(one.C, other.C, share),
        lag=torch.lerp(one.lag, other.lag, share),
        drift=drift,
        mean_input=torch.lerp(one.mean_input, other.mean_input, share),
        mean_lag=torch.lerp(one.mean_lag, other.mean_lag, share),
        mean_drift=torch.lerp(one.mean_drift, other.mean_drift, share),
        lag_energy=one.lag_energy + share * (other.lag_energy - one.lag_energy),
        missing_energy=one.missing_energy + share * (other.missing_energy - one.missing_energy),
        weight=one.weight + other.weight,
        tokens=one.tokens + other.tokens,
    )


def token_weights(y: torch.Tensor) -> torch.Tensor:
    """w [T] of what a norm sees, [T, out]: 1 / RMS^2, as it weighs the tokens' errors, none of them too much."""
    w = y.pow(2).mean(1).clamp_min(torch.finfo(y.dtype).tiny).reciprocal()
    return w.clamp_max(LARGEST_WEIGHT * float(w.median())) if len(w) else w


class Accumulator:
    """Sums for one projection. Windows are added one after the other, so their order alone fixes the result.

    Args:
        W: float32 [out, in], the original weight.
        residual: whether the drift of the residual is known.
    """

    def __init__(self, W: torch.Tensor, *, residual: bool) -> None:
        out, width = W.shape
        shapes: dict[str, tuple[int, ...]] = {"C": (width, width), "lag": (out, width), "drift": (out, width)}
        shapes |= {"mean_input": (width,), "mean_lag": (out,), "mean_drift": (out,)}
        shapes |= {"lag_energy": (), "missing_energy": (), "weight": ()}
        if not residual:
            del shapes["drift"]
        self.W, self._residual = W, residual
        self._sums = {name: W.new_zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._waiting: list[tuple[torch.Tensor, ...]] = []
        self._tokens = 0

    def add(
        self,
        inputs: torch.Tensor,
        original: torch.Tensor,
        drift: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Adds the tokens of one window.

        Args:
            inputs, original: x^ and x, [T, in].
            drift: r - r^, [T, out]; needed where the residual is known.
            weights: w, [T]; 1 for None.
        """
        lag = (original.float() - inputs.float()) @ self.W.T
        e = lag.new_zeros(len(lag), 0) if drift is None else drift.float()
        w = lag.new_ones(len(lag)) if weights is None else weights.float()
        self._waiting.append((inputs.float(), lag, e, w))
        self._tokens += len(lag)
        if sum(len(one[0]) for one in self._waiting) >= ROWS:
            self._flush()

    def mean(self) -> Statistics:
        """Means of all that was added; the accumulator is spent."""
        self._flush()
        sums, self._sums = self._sums, {}
        weight = float(sums.pop("weight"))
        energies = [float(sums.pop(name)) / (weight or 1.0) for name in ("lag_energy", "missing_energy")]
        means = {name: total.div_(weight or 1.0) for name, total in sums.items()}
        C = means.pop("C")
        return Statistics(
            C=(C + C.T).div_(2),
            lag=means["lag"],
            drift=means.get("drift"),
            mean_input=means["mean_input"],
            mean_lag=means["mean_lag"],
            mean_drift=means["mean_drift"],
            lag_energy=energies[0],
            missing_energy=energies[1],
            weight=weight,
            tokens=self._tokens,
        )

    def _flush(self) -> None:
        """Products in float32 over the waiting tokens, sums of them in float64."""
        if not self._waiting:
            return
        x, lag, e, w = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting = []
        weighted = x * w.unsqueeze(1)
        sums = self._sums
        sums["C"] += x.T @ weighted
        sums["lag"] += lag.T @ weighted
        sums["mean_input"] += weighted.sum(0, dtype=torch.float64)
        sums["mean_lag"] += w.double() @ lag.double()
        sums["lag_energy"] += w.double() @ lag.double().pow(2).sum(1)
        missing = lag
        if self._residual:
            sums["drift"] += e.T @ weighted
            sums["mean_drift"] += w.double() @ e.double()
            missing = lag + e
        sums["missing_energy"] += w.double() @ missing.double().pow(2).sum(1)
        sums["weight"] += w.sum(dtype=torch.float64)
