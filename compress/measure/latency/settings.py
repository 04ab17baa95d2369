"""What is timed and for how long: variants, workloads and when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compress.errors import UsageError

Kind = Literal["decoder", "encoder"]
TIMES: dict[str, tuple[str, ...]] = {"decoder": ("ttft", "tpot", "e2e"), "encoder": ("forward",)}
"""What is timed, by the names in a Sample; in the table of metrics each is `latency.NAME`."""
LOADERS = ("stock", "reference")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Variant:
    """One thing to time: any Hugging Face folder, or a result of ours.

    Attributes:
        label: how it is called in figures and errors, unique in a run.
        loader: "stock" is transformers' own from_pretrained; "reference" runs on dequantized weights.
        dtype: "float32", "bfloat16" or "float16".
    """

    label: str
    folder: Path
    loader: Literal["stock", "reference"]
    dtype: str


@dataclass(frozen=True)
class Workload:
    """What one sample is. Lengths in tokens; an encoder has no new_tokens (None)."""

    kind: Kind
    prompt: int
    new_tokens: int | None
    batch: int

    @property
    def positions(self) -> int:
        """Positions a model must hold; the last token is generated but never fed back."""
        return self.prompt + (self.new_tokens - 1 if self.new_tokens is not None else 0)

    @property
    def compared(self) -> tuple[str, ...]:
        """The times that an asked precision is about: e2e is made of the other two."""
        if self.kind == "encoder":
            return ("forward",)
        return ("ttft",) if self.new_tokens == 1 else ("ttft", "tpot")

    def faults(self) -> list[str]:
        if self.kind not in TIMES:
            return [f"kind is {self.kind!r}, not one of {', '.join(TIMES)}"]
        counts = {"prompt": self.prompt, "batch": self.batch}
        faults = []
        if self.kind == "encoder" and self.new_tokens is not None:
            faults.append("an encoder generates no new_tokens")
        if self.kind == "decoder":
            counts["new_tokens"] = self.new_tokens or 0
        return faults + [f"{name} is {value}, must be above 0" for name, value in counts.items() if value <= 0]


@dataclass(frozen=True)
class Stop:
    """When enough was measured.

    Attributes:
        budget: seconds of measuring for all workloads together; loading and warm-up come on top.
        precision: relative half width at which to stop before (0.02: every compared ratio known to 2 %); None uses
            the whole budget.
    """

    budget: float
    precision: float | None = None

    def faults(self) -> list[str]:
        faults = []
        if not (math.isfinite(self.budget) and self.budget > 0):
            faults.append(f"budget is {self.budget} s, must be above 0")
        if self.precision is not None and not 0 < self.precision < 1:
            faults.append(f"precision is {self.precision}, must lie between 0 and 1")
        return faults


def check_settings(
    variants: Sequence[Variant],
    original_labels: Sequence[str],
    workloads: Sequence[Workload],
    stop: Stop,
    threads: int,
) -> None:
    """All faults of the settings at once.

    Raises:
        UsageError: with one line for each.
    """
    labels = [variant.label for variant in variants]
    faults = [f"no variant is called {label!r}" for label in original_labels if label not in labels]
    if len(set(labels)) != len(labels):
        faults.append(f"two variants share a label: {', '.join(labels)}")
    if not original_labels:
        faults.append("no variant is named as the original")
    if not workloads:
        faults.append("there is no workload")
    for variant in variants:
        if variant.loader not in LOADERS:
            faults.append(f"{variant.label}: loader {variant.loader!r} is not one of {', '.join(LOADERS)}")
        if variant.dtype not in DTYPES:
            faults.append(f"{variant.label}: dtype {variant.dtype!r} is not one of {', '.join(DTYPES)}")
    faults += [fault for workload in workloads for fault in workload.faults()] + stop.faults()
    if threads <= 0:
        faults.append(f"threads is {threads}, must be above 0")
    if faults:
        raise UsageError("latency cannot be measured:\n" + "\n".join(dict.fromkeys(faults)))
