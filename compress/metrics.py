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
        tasks: whether it is measured for each task, and pooled over all: a gate may name one, `accuracy[NAME].drop`.
        version: counts up when the definition changes, so that numbers of two definitions are never compared.
    """

    id: str
    unit: Unit
    better: Literal["lower", "higher", "none"]
    definition: str
    gate: bool = True
    interval: bool = True
    tasks: bool = False
    version: int = 1

    @property
    def definition_id(self) -> str:
        """`latency.ttft/1`: what tools must agree on before they compare two numbers."""
        return f"{self.id}/{self.version}"


def _task_metrics() -> tuple[Metric, ...]:
    """Of tasks with right and wrong answers; both models answer the same items."""

    def metric(
        id: str,
        unit: Unit,
        better: Literal["lower", "higher", "none"],
        text: str,
        gate: bool = True,
        interval: bool = True,
    ) -> Metric:
        return Metric(id, unit, better, text, gate=gate, interval=interval, tasks=True)

    return (
        metric("accuracy", "%", "higher", "Share of items answered right."),
        metric("accuracy.drop", "pt", "lower", "Accuracy of the original - accuracy of the result, paired by item."),
        metric("accuracy.flips", "%", "lower", "Share of items that one model answers right and the other wrong."),
        metric("accuracy.losses", "", "lower", "Items that only the original answers right.", interval=False),
        metric("accuracy.gains", "", "higher", "Items that only the result answers right.", interval=False),
        metric(
            "accuracy.mcnemar_p",
            "",
            "none",
            "One-sided exact McNemar test: chance of so many losses or more among the flips if nothing got worse.",
            gate=False,
            interval=False,
        ),
        # No gate on plain recovery: near chance it says nothing.
        metric("accuracy.recovery", "%", "higher", "Accuracy of the result / accuracy of the original.", gate=False),
        metric(
            "accuracy.recovery_corrected",
            "%",
            "higher",
            "(Accuracy of the result - chance) / (accuracy of the original - chance).",
        ),
        metric(
            "accuracy.expected",
            "%",
            "higher",
            "Mean probability of the right choice: softmax over the choices of the score that decides (of acc_norm the "
            "log-likelihood per character).",
        ),
        metric("accuracy.expected_drop", "pt", "lower", "Expected accuracy of the original - that of the result."),
        metric(
            "accuracy.margin_shift",
            "nats",
            "higher",
            "Mean change, result - original, of the margin of the right choice over the best wrong one, in the score "
            "that decides (of acc_norm the log-likelihood per character).",
        ),
    )


def _latency_metrics() -> tuple[Metric, ...]:
    """Each time with its ratio and its tail; a tail has a value only where the sample can carry it."""
    times = {
        "ttft": "Time to first token: prefill of the prompt and one sampled token; tokenization excluded.",
        "tpot": "Time per output token: (end to end - time to first token) / (new tokens - 1).",
        "e2e": "End to end: from the prompt's start to the last token.",
        "forward": "Time of one forward pass of an encoder over the prompt.",
    }
    found = []
    for name, text in times.items():
        ratio = "Median of result / original over interleaved blocks."
        found += [
            Metric(f"latency.{name}", "ms", "lower", f"{text} Median."),
            Metric(f"latency.{name}.p90", "ms", "lower", f"{text} 90th percentile."),
            Metric(f"latency.{name}.p99", "ms", "lower", f"{text} 99th percentile."),
            Metric(f"latency.{name}.ratio", "x", "lower", ratio),
        ]
    return tuple(found)


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
        Metric("kl.p999", "nats", "lower", "99.9th percentile of the per-token KL."),
        Metric("kl.max", "nats", "lower", "Largest per-token KL that was seen; grows with the text.", interval=False),
        Metric(
            "tv.mean",
            "",
            "lower",
            "Mean over predicted tokens of the total variation distance of the two next-token distributions, 0..1; "
            "1 - tv.mean is the share of tokens that speculative sampling would accept.",
        ),
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
        Metric(
            "similarity.spearman",
            "",
            "higher",
            "Spearman rank correlation, original against result, of the cosines of all pairs of texts.",
        ),
        Metric(
            "ndcg",
            "%",
            "higher",
            "nDCG@10 of retrieval: each title is a query, its article without the title the only relevant document.",
        ),
        Metric("ndcg.drop", "pt", "lower", "nDCG@10 of the original - nDCG@10 of the result, paired by query."),
        *_task_metrics(),
        Metric(
            "generation.length_ratio",
            "x",
            "none",
            "Tokens that the result generates / tokens that the original generates, greedy, same prompts.",
        ),
        Metric(
            "generation.repetition",
            "%",
            "lower",
            "Share of generated 4-grams that occurred before in the same answer.",
        ),
        Metric(
            "generation.first_divergence",
            "",
            "higher",
            "Median over prompts of the number of generated tokens before the two greedy answers part.",
        ),
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
            "kv_bytes",
            "B",
            "lower",
            "Bytes of keys and values in the cache for each token, in the checkpoint's dtype: 2 x layers x key and "
            "value heads x size of a head x bytes of a number; layers with a sliding window count as the others.",
            interval=False,
        ),
        *_latency_metrics(),
        Metric(
            "throughput.prefill",
            "tok/s",
            "higher",
            "Prompt tokens of the batch / median time to first token.",
        ),
        Metric(
            "throughput.decode",
            "tok/s",
            "higher",
            "Sequences of the batch / median time per output token.",
        ),
        Metric(
            "cpu.ratio",
            "x",
            "lower",
            "Median over interleaved blocks of result / original of the CPU time (all threads) of one sample.",
        ),
        Metric(
            "latency.load",
            "ms",
            "lower",
            "Time to read the folder and build the model, once, in a fresh process that has imported torch and "
            "transformers.",
            interval=False,
        ),
        Metric(
            "memory.peak",
            "MB",
            "lower",
            "Peak resident memory of a process that loads and runs only this model, read after the first sample.",
            interval=False,
        ),
    )
}
