"""How close a decoder's next-token distributions stayed to the original's, token by token on the same text.

What counts as one measured token:
  1. Each window is run alone, from its first id, through both models: no padding, no cache, no overlap.
  2. The logits at position i predict the id at position i + 1.
  3. Leading special ids of a window (BOS; `Windows.special` of them) are context and never predicted.
  4. The first real id of a window is predicted only where a special id stands before it; else it is context.
  5. So the predicted positions of a window of n ids are max(1, special) .. n - 1, and perplexity, KL, total variation
     and top-1 agreement are all taken over exactly these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compress.divergence import compare, token_nll
from compress.errors import BrokenResultError, UsageError
from compress.measure.statistics import (
    Estimate,
    block_mean,
    block_quantile,
    block_share,
    carries_percentile,
    count_for_percentile,
    token_blocks,
)
from compress.records import ORIGINAL, PAIRED, RESULT, Measurement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.data.windows import Windows
    from compress.progress import Progress

WIDE_BYTES = 20_000_000
"""Bound on the full-vocabulary float64 copies that exist at one time; what fits a cache is twice as fast."""
WIDE_COPIES = 8
"""Float64 [chunk, vocabulary] tensors alive at the worst moment of `compare`, with one to spare."""


@dataclass(frozen=True)
class FidelityTokens:
    """One entry per predicted token, windows in order; all arrays [N].

    Attributes:
        kl: KL(original || result), nats, float64.
        tv: total variation distance of the two next-token distributions, 0..1, float64.
        nll_original, nll_result: negative log-likelihood of the text's token, nats, float64.
        same_top1: whether both models find the same token most likely.
        window: index of the window the token belongs to, int64.
    """

    kl: npt.NDArray[np.float64]
    tv: npt.NDArray[np.float64]
    nll_original: npt.NDArray[np.float64]
    nll_result: npt.NDArray[np.float64]
    same_top1: npt.NDArray[np.bool_]
    window: npt.NDArray[np.int64]

    def rows(self, kind: str = "fidelity") -> list[dict[str, Any]]:
        """One row of plain data per window, nothing rounded, for the raw file in the report folder."""
        columns = ("kl", "tv", "nll_original", "nll_result", "same_top1")
        found = []
        for window in np.unique(self.window):
            here = self.window == window
            values = {name: getattr(self, name)[here].tolist() for name in columns}
            found.append({"kind": kind, "window": int(window)} | values)
        return found


def compare_logits(
    original: PreTrainedModel, result: PreTrainedModel, windows: Windows, progress: Progress
) -> FidelityTokens:
    """Runs both models over every window and compares their logits.

    Args:
        original, result: float32, in eval mode, on one device, with the same vocabulary.

    Raises:
        BrokenResultError: logits of a model are not finite, or the vocabularies differ.
        UsageError: no window is long enough to predict a token.
        ValueError: a model is not float32, or the devices differ.
    """
    _check_alike(original, result)
    first = first_predicted(windows)
    parts: list[FidelityTokens] = []
    with torch.inference_mode(), progress.phase("fidelity", len(windows.ids)) as advance:
        for index, ids in enumerate(windows.ids):
            if len(ids) > first:
                logits = [
                    finite_logits(model, ids, name, index)[first - 1 : -1]  # [T, V]
                    for model, name in ((original, ORIGINAL), (result, RESULT))
                ]
                parts.append(compare_window(logits[0], logits[1], ids[first:].to(original.device), index))
            advance(1)
    return joined(parts)


def first_predicted(windows: Windows) -> int:
    """Index of the first id of a window that is predicted.

    Raises:
        UsageError: no window is long enough to predict a token.
    """
    first = max(1, windows.special)
    if all(len(ids) <= first for ids in windows.ids):
        raise UsageError(
            f"no window has more than {first} tokens, so there is nothing to predict",
            hint="use longer evaluation text",
        )
    return first


def joined(parts: Sequence[FidelityTokens]) -> FidelityTokens:
    """The tokens of all parts, in order."""
    names = [field.name for field in fields(FidelityTokens)]
    return FidelityTokens(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def fidelity_measurements(
    tokens: FidelityTokens,
    *,
    levels: Sequence[float] = (),
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """KL, total variation, top-1 agreement and perplexity with 95 % block-bootstrap intervals.

    Args:
        levels: one-sided confidence levels that gates ask for; 0.95 is always added.
        seed: of the resampling; each metric starts from it anew, so none depends on which others are asked.
    """
    blocks, words = token_blocks(tokens.window)
    wanted = tuple(sorted({0.95, *levels}))
    count = len(tokens.kl)
    facts = dict(conditions or {}) | {"windows": len(np.unique(tokens.window))}

    def options() -> dict[str, Any]:
        return {"rng": np.random.default_rng(seed), "levels": wanted, "blocks_are": words}

    def measured(metric: str, subject: str, estimate: Estimate) -> Measurement:
        return Measurement(metric, subject, estimate.value, count, estimate.interval, estimate.one_sided, facts)

    def percentile(metric: str, p: float) -> Measurement:
        return percentile_measurement(
            metric, PAIRED, p, count, facts, lambda: block_quantile(tokens.kl, p, blocks, **options())
        )

    def perplexity(values: npt.NDArray[np.float64]) -> Estimate:
        return block_mean(values, blocks, **options()).map(_exp)

    return [
        measured("kl.mean", PAIRED, block_mean(tokens.kl, blocks, **options())),
        measured("kl.median", PAIRED, block_quantile(tokens.kl, 0.5, blocks, **options())),
        percentile("kl.p99", 0.99),
        percentile("kl.p999", 0.999),
        measured("kl.max", PAIRED, Estimate(float(tokens.kl.max()))),
        measured("tv.mean", PAIRED, block_mean(tokens.tv, blocks, **options())),
        measured("top1.agreement", PAIRED, block_share(tokens.same_top1, blocks, **options()).map(_percent)),
        measured("perplexity", ORIGINAL, perplexity(tokens.nll_original)),
        measured("perplexity", RESULT, perplexity(tokens.nll_result)),
        # exp(mean difference) is the ratio of the two perplexities, resampled in pairs.
        measured("perplexity.ratio", PAIRED, perplexity(tokens.nll_result - tokens.nll_original)),
    ]


def percentile_measurement(
    metric: str,
    subject: str,
    p: float,
    count: int,
    conditions: Mapping[str, Any],
    estimate: Callable[[], Estimate],
) -> Measurement:
    """A percentile (p in 0..1) if `count` values can carry it, else a Measurement without a value that says why."""
    if carries_percentile(count, p):
        found = estimate()
        return Measurement(metric, subject, found.value, count, found.interval, found.one_sided, conditions)
    needed = count_for_percentile(max(p, 1 - p))
    note = f"{count} values cannot carry a {100 * p:g}th percentile; it needs {needed}"
    return Measurement(metric, subject, None, count, conditions=conditions, note=note)


def _check_alike(original: PreTrainedModel, result: PreTrainedModel) -> None:
    if original.device != result.device:
        raise ValueError(f"original on {original.device}, result on {result.device}: they must share a device")
    for name, model in ((ORIGINAL, original), (RESULT, result)):
        if model.dtype != torch.float32:
            raise ValueError(f"the {name} is {model.dtype}; fidelity is measured in float32")


def finite_logits(model: PreTrainedModel, ids: Tensor, name: str, window: int) -> Tensor:
    """Logits [n, V] of one window of ids [n]; a BrokenResultError names model, window and position."""
    output: Tensor = model(input_ids=ids.unsqueeze(0).to(model.device), use_cache=False).logits[0]
    finite = output.isfinite().all(dim=-1)  # [n]
    if not bool(finite.all()):
        position = int((~finite).nonzero()[0])
        raise BrokenResultError(
            f"logits of the {name} model are not finite in window {window}, position {position}",
            hint=not_finite_hint(name),
        )
    return output


def not_finite_hint(name: str) -> str:
    """The way out where the numbers of `name`, "original" or "result", are not finite."""
    if name == RESULT:
        return "the weights overflow or hold NaN; check the layer errors of the report"
    return "the original itself is broken in float32; check its weights"


def compare_window(original: Tensor, result: Tensor, targets: Tensor, window: int) -> FidelityTokens:
    """Per-token figures of logits [T, V] and [T, V] for the target ids [T], a few positions at a time."""
    if original.shape != result.shape:
        raise BrokenResultError(
            f"the original scores {original.shape[-1]} tokens and the result {result.shape[-1]}: "
            "the vocabularies differ",
            hint="compare with the original that the result was made from",
        )
    # Apple's GPUs have no float64.
    wide = torch.float32 if original.device.type == "mps" else torch.float64
    rows = max(1, WIDE_BYTES // (WIDE_COPIES * 8 * original.shape[-1]))
    parts = []
    for p, q, ids in zip(
        torch.split(original, rows), torch.split(result, rows), torch.split(targets, rows), strict=True
    ):
        found = compare(p, q, dtype=wide)
        columns = {
            "kl": found.kl,
            "tv": found.tv,
            "nll_original": token_nll(p, ids, dtype=wide),
            "nll_result": token_nll(q, ids, dtype=wide),
        }
        arrays = {name: column.cpu().double().numpy() for name, column in columns.items()}
        same = found.same_top1.cpu().numpy()
        parts.append(FidelityTokens(**arrays, same_top1=same, window=np.full(len(ids), window)))
    return joined(parts)


def _exp(value: float) -> float:
    """exp that saturates at inf, as numpy does, instead of raising."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _percent(share: float) -> float:
    return 100 * share
