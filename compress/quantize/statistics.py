"""What calibration tells a group of layers with a common input: sums over tokens, and what follows from them.

Letters: x input of the layer in the quantized model and x~ in the original one, both [in] for each token; r and r~ what
the block adds the layer's output to (its residual) [out]. Sums are float32 whatever the model computes in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg.blas import ssyrk

_ROWS = 256  # that are widened to float64 at once


@dataclass(frozen=True)
class Statistics:
    """Means over tokens.

    Attributes:
        H: float32 [in, in], mean of x x^T.
        input_drift: float32 [in, in], mean of (x~ - x) x^T; None without a second stream.
        residual_drift: float32 [out, in], mean of (r~ - r) x^T; None where no residual is known.
        tokens: number of tokens seen.
    """

    H: torch.Tensor
    input_drift: torch.Tensor | None
    residual_drift: torch.Tensor | None
    tokens: int

    def normalised(self) -> Statistics:
        """The same in units in which the mean square of a live input is one: float32 sums of tiny inputs underflow."""
        unit = 1.0 / mean_alive(self.H)
        inner, residual = (
            None if one is None else _scaled(one, unit) for one in (self.input_drift, self.residual_drift)
        )
        return Statistics(_scaled(self.H, unit), inner, residual, self.tokens)

    def scaled(self, s: torch.Tensor) -> Statistics:
        """The same for inputs x / s, s float32 [in]."""
        inner = [None if one is None else one / s / s.unsqueeze(1) for one in (self.H, self.input_drift)]
        assert inner[0] is not None
        residual = None if self.residual_drift is None else self.residual_drift / s
        return Statistics(inner[0], inner[1], residual, self.tokens)


def mean_alive(H: torch.Tensor) -> float:
    """Mean of the diagonal over the inputs that were not always zero; 1 where all were."""
    alive = H.diagonal()[H.diagonal() != 0]
    return float(alive.double().mean()) if alive.numel() else 1.0


class Accumulator:
    """Sums for one group; windows are added one after the other, so their order alone fixes the result."""

    def __init__(self, width: int, device: str) -> None:
        self._device = device
        # BLAS fills one triangle of a column-major matrix: half the work of a full product
        self._triangle = np.zeros((width, width), dtype=np.float32, order="F") if device == "cpu" else None
        self._sum = None if device == "cpu" else torch.zeros(width, width, device=device)
        self._input_drift: torch.Tensor | None = None
        self._residual_drift: torch.Tensor | None = None
        self._tokens = 0

    def add(
        self,
        inputs: torch.Tensor,
        original_inputs: torch.Tensor | None = None,
        residual_drift: torch.Tensor | None = None,
    ) -> None:
        """Adds one window.

        Args:
            inputs: x, [..., T, in].
            original_inputs: x~, of the same shape.
            residual_drift: r~ - r, [..., T, out].
        """
        x = inputs.detach().reshape(-1, inputs.shape[-1])  # [T, in]
        if not len(x):
            return  # an expert that no token of the window was sent to
        X = x.float()
        self._add_symmetric(X)
        self._tokens += X.shape[0]
        if original_inputs is not None:
            drift = original_inputs.detach().reshape(x.shape) - x
            self._input_drift = _plus(self._input_drift, drift, x)
        if residual_drift is not None:
            self._residual_drift = _plus(self._residual_drift, residual_drift.detach().reshape(X.shape[0], -1), x)

    def _add_symmetric(self, X: torch.Tensor) -> None:
        if self._triangle is not None:
            self._triangle = ssyrk(1.0, X.numpy().T, beta=1.0, c=self._triangle, overwrite_c=True)
        else:
            assert self._sum is not None
            self._sum.addmm_(X.T, X)

    def mean(self) -> Statistics:
        """Means of all that was added; the accumulator is spent."""
        count = max(self._tokens, 1)
        if self._triangle is not None:
            H = torch.from_numpy(self._triangle).T.tril_()  # the transpose is row-major
            self._triangle = None
            H += H.tril(-1).T
        else:
            assert self._sum is not None
            H, self._sum = self._sum, None
        inner, residual = (
            None if drift is None else drift.div_(count) for drift in (self._input_drift, self._residual_drift)
        )
        self._input_drift = self._residual_drift = None
        return Statistics(H.div_(count), inner, residual, self._tokens)


def _scaled(sums: torch.Tensor, unit: float) -> torch.Tensor:
    """sums * unit in float64, rounded to float32, some rows after the other."""
    found = torch.empty_like(sums)
    for start in range(0, len(sums), _ROWS):
        rows = slice(start, start + _ROWS)
        found[rows] = sums[rows].double() * unit
    return found


def _plus(total: torch.Tensor | None, left: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """total + left^T x. The product of one window has the streams' own dtype: a correction needs no more digits.

    Only float16 would overflow.
    """
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    product = (left.to(dtype).T @ x.to(dtype)).float()
    return product if total is None else total.add_(product)
