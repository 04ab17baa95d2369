"""The table of metrics: id, unit, direction, definition. A recipe refuses an unknown metric without torch.

Each number in a report names its metric; the definition printed beside it comes from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["", "nats", "%", "pt", "B", "MB", "ms", "x", "bits", "tok/s"]


@dataclass(frozen=True)
class Metric:
    """One thing that can be measured.

    Attributes:
        unit: the unit of every stored value of this metric: a share with unit "%" is stored as 79.5, a size
            with unit "MB" as 120.3.
        better: "lower" or "higher"; "none" where neither is better.
        gate: whether a gate may name it.
        interval: whether it is estimated from a sample and can have a confidence interval. What is counted in
            files, or read once from the operating system, cannot; a gate on it takes no `@LEVEL`.
    """

    id: str
    unit: Unit
    better: Literal["lower", "higher", "none"]
    definition: str
    gate: bool = True
    interval: bool = True


METRICS: dict[str, Metric] = {
    metric.id: metric
    for metric in (
        Metric(
            "kl.mean",
            "nats",
            "lower",
            "Mean over predicted tokens of KL(original || result) of the next-token distributions, float32.",
        ),
        Metric("kl.median", "nats", "lower", "Median of the per-token KL."),
        Metric("kl.p99", "nats", "lower", "99th percentile of the per-token KL."),
        Metric(
            "top1.agreement",
            "%",
            "higher",
            "Share of predicted tokens whose most likely token is the same in both models.",
        ),
        Metric(
            "perplexity",
            "",
            "lower",
            "exp(mean negative log-likelihood) of held-out text in windows; the first token of a window is not "
            "predicted.",
        ),
        Metric("perplexity.ratio", "x", "lower", "Perplexity of the result / perplexity of the original."),
        Metric(
            "cosine.mean",
            "",
            "higher",
            "Mean over texts of the cosine similarity of the two models' embeddings.",
        ),
        Metric("cosine.p5", "", "higher", "5th percentile of that cosine similarity."),
        Metric("size", "MB", "lower", "All weight files of the folder, MB = 10^6 bytes.", interval=False),
        Metric(
            "size.ratio",
            "x",
            "lower",
            "Weight files of the result / weight files of the original.",
            interval=False,
        ),
        Metric(
            "bits_per_weight",
            "bits",
            "lower",
            "Bits on disk per parameter of the quantized layers, scales and packing included.",
            interval=False,
        ),
        Metric(
            "parameters",
            "",
            "none",
            "Number of weights the model computes with; a tied tensor counts once.",
            interval=False,
        ),
        Metric(
            "latency.ttft",
            "ms",
            "lower",
            "Time to first token: prefill of the prompt and one sampled token; tokenization excluded. Median.",
        ),
        Metric(
            "latency.tpot",
            "ms",
            "lower",
            "Time per output token: (end-to-end - time to first token) / (new tokens - 1). Median.",
        ),
        Metric(
            "latency.forward",
            "ms",
            "lower",
            "Time of one forward pass of an encoder over the prompt. Median.",
        ),
        Metric("latency.ttft.ratio", "x", "lower", "Median of result / original over interleaved blocks."),
        Metric("latency.tpot.ratio", "x", "lower", "Median of result / original over interleaved blocks."),
        Metric("latency.forward.ratio", "x", "lower", "Median of result / original over interleaved blocks."),
        Metric(
            "memory.peak",
            "MB",
            "lower",
            "Peak resident memory of a process that loads and runs only this model.",
            interval=False,
        ),
    )
}
