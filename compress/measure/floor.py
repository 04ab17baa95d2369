"""The noise floor: how far the original is from itself in another dtype, or in another batch layout.

A difference between original and result below this floor is one that users of the original meet every day.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.errors import BrokenResultError
from compress.measure.fidelity import (
    FidelityTokens,
    compare_window,
    fidelity_measurements,
    finite_logits,
    first_predicted,
    joined,
)
from compress.records import FLOOR, ORIGINAL, PAIRED, Measurement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.data.windows import Windows
    from compress.progress import Progress

DTYPES = "bfloat16 against float32"
LAYOUTS = "two windows in one batch against one alone"
METRICS = ("kl.mean", "kl.p99", "top1.agreement", "tv.mean", "perplexity.ratio")
TOKENS = 2048
LENGTH = 256
"""Windows are cut to so many tokens: three sets of logits are held at a time, for two windows in one batch."""


@dataclass(frozen=True)
class Floor:
    """The original against itself.

    Attributes:
        comparison: what differs, in words.
        tokens: as original against result, the second pass in the place of the result; None where it cannot be had.
        note: why there are no tokens.
    """

    comparison: str
    tokens: FidelityTokens | None
    note: str | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row of plain data per window, for the raw file in the report folder."""
        if self.tokens is None:
            return []
        return [row | {"comparison": self.comparison} for row in self.tokens.rows("floor")]


def floor_tokens(original: PreTrainedModel, windows: Windows, progress: Progress) -> list[Floor]:
    """The original against itself: about the first TOKENS tokens in bfloat16, and the first two windows in one batch.

    Args:
        original: float32, in eval mode. Its weights are there once more, in bfloat16, while this runs.

    Raises:
        BrokenResultError: logits in float32 are not finite.
        UsageError: no window is long enough to predict a token.
    """
    first = first_predicted(windows)
    ids = [window[:LENGTH].to(original.device) for window in windows.ids if len(window) > first]
    ids = ids[: max(1, TOKENS // len(ids[0]))]
    with torch.inference_mode(), progress.phase("noise floor", len(ids) + 2) as advance:
        alone = partial(finite_logits, original, name=ORIGINAL)
        return [_dtypes(original, alone, ids, first, advance), *_layouts(original, alone, ids[:2], first, advance)]


def floor_measurements(
    floors: Sequence[Floor],
    *,
    levels: Sequence[float] = (),
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """METRICS of each comparison, subject "original/original"; conditions["comparison"] says what differs."""
    found = []
    for floor in floors:
        facts = dict(conditions or {}) | {"comparison": floor.comparison}
        if floor.tokens is None:
            found.append(Measurement(METRICS[0], FLOOR, None, conditions=facts, note=floor.note))
            continue
        measured = fidelity_measurements(floor.tokens, levels=levels, seed=seed, conditions=facts)
        found += [replace(one, subject=FLOOR) for one in measured if one.subject == PAIRED and one.metric in METRICS]
    return found


def in_bfloat16(model: torch.nn.Module) -> Callable[..., Any]:
    """The model's forward pass with bfloat16 weights, buffers as they are: what loading in bfloat16 gives.

    The model itself keeps its weights; those in bfloat16 live as long as what is returned.
    """
    weights = {name: weight.to(torch.bfloat16) for name, weight in model.named_parameters()}

    def forward(**inputs: Any) -> Any:
        return torch.func.functional_call(model, weights, kwargs=inputs)

    return forward


def _dtypes(
    original: PreTrainedModel, alone: Callable[..., Tensor], ids: Sequence[Tensor], first: int, advance: Any
) -> Floor:
    parts = []
    try:
        narrow = in_bfloat16(original)
        for index, window in enumerate(ids):
            logits = narrow(input_ids=window.unsqueeze(0), use_cache=False).logits[0, first - 1 : -1]  # [T, V]
            if not bool(logits.isfinite().all()):
                return Floor(DTYPES, None, "the original's logits are not finite in bfloat16")
            wide = alone(ids=window, window=index)[first - 1 : -1]
            parts.append(compare_window(wide, logits, window[first:], index))
            advance(1)
    except RuntimeError as error:  # a device or an operation without bfloat16
        reason = str(error).partition("\n")[0]
        return Floor(DTYPES, None, f"the original does not run in bfloat16 here: {reason}")
    return Floor(DTYPES, joined(parts))


def _layouts(
    original: PreTrainedModel, alone: Callable[..., Tensor], pair: Sequence[Tensor], first: int, advance: Any
) -> list[Floor]:
    """Nothing without two windows of one length. One pair is enough: most CPUs give the same bits in either layout."""
    if len({len(window) for window in pair}) != 1 or len(pair) != 2:
        return []
    logits = original(input_ids=torch.stack(list(pair)), use_cache=False).logits[:, first - 1 : -1]  # [2, T, V]
    if not bool(logits.isfinite().all()):
        raise BrokenResultError("logits of the original model are not finite in a batch of the first two windows")
    parts = []
    for index, window in enumerate(pair):
        wide = alone(ids=window, window=index)[first - 1 : -1]
        parts.append(compare_window(wide, logits[index], window[first:], index))
        advance(1)
    return [Floor(LAYOUTS, joined(parts))]
