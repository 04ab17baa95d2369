"""How many layers may be rounded to nearest because gptq could not be applied to them."""

from __future__ import annotations

from compress.errors import BrokenResultError
from compress.records import StepRecord

_LISTED = 20


def check_fallback(step: StepRecord, max_fallback: float) -> None:
    """Raises BrokenResultError, naming the layers, if more than a share `max_fallback` of them fell back."""
    names = [layer.name for layer in step.fallback]
    share = len(names) / max(step.layers_quantized, 1)
    if share <= max_fallback:
        return
    more = f"\n  ... and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    needed = -(-1000 * len(names) // step.layers_quantized) / 10
    raise BrokenResultError(
        f"{len(names)} of {step.layers_quantized} layers ({100 * share:.3g}%) fell back from "
        f"{step.settings['algorithm']} to round-to-nearest; allowed are {100 * max_fallback:.3g}%:\n  "
        + "\n  ".join(names[:_LISTED])
        + more,
        hint=f"More calibration text usually mends this. To allow it: --max-fallback {needed:g}% "
        f"(`max_fallback: {needed:g}%` in a recipe).",
    )
