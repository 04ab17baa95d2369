"""What a step did and what was measured: plain frozen data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compress.scheme import TARGETS

ORIGINAL, RESULT, PAIRED = "original", "result", "result/original"
"""What a measurement is of."""
FLOOR = "original/original"
"""The original against itself."""
WORKLOAD = ("batch", "prompt", "new_tokens")
"""The conditions that say what was timed."""


@dataclass(frozen=True)
class LayerRecord:
    """What was done to one weight.

    Attributes:
        name: module name of the layer ("model.layers.0.mlp.up_proj").
        shape: [out, in] as the layer computes, also where the file stores it transposed.
        target, algorithm, group_size, scheme: what was applied; None where the weight was left alone.
        damping: the share of the mean Hessian diagonal that was added (GPTQ), after any raising.
        rank_bound: upper bound on the Hessian's rank: min(tokens, width).
        tokens: calibration tokens that reached the layer.
        error_before: relative error of the layer's outputs under plain round-to-nearest with max-abs scales,
            tr(D H D^T) / tr(T H T^T) with D = T - Q(W) and T the weights whose outputs the codes were fitted to: W, or
            with asymmetric calibration the W* that also corrects earlier layers. H is of the inputs in the
            quantized model, the identity without calibration. Rounding of inputs is not in it.
        error_after: the same for the codes that were chosen, factors of `smoothing` taken out.
        skipped: why the weight was left alone; None if it was quantized.
        notes: what a reader should know (dead columns, raised damping, zero groups).
        sha256: hash of the dequantized float32 weight [out, in], little-endian, C order.
        smoothing: factors that were folded into what produces the layer's inputs: `producer` (its module name),
            `spread` and `alpha` (see compress.quantize.smooth), `error_before` and `error_after` (relative output error
            of the group of layers without factors and with them); None where there are no factors.
        pruning: of a projection some of whose inputs were removed, or that was fitted to what others removed: `unit`
            ("ffn", "heads" or "kv_heads"), `of` (how many there were), `kept` (which stayed, ascending), `ridge` (the
            share of the mean diagonal of the inputs' covariance that was added for the fit; None without a fit), and
            the squared error of what the block adds up here relative to the projection's output, on held-out tokens:
            `error_masked` (columns removed, the others as they were), `error_measured` (as stored), `error_predicted`
            (told from `error_fitted`, on the tokens of the fit, and from the drift that arrives); not there without
            text. `drift_ridge` and `residual_share` say how the drift of earlier blocks was corrected. `shape` is that
            of the pruned weight.
    """

    name: str
    shape: tuple[int, ...]
    target: str | None = None
    algorithm: str | None = None
    group_size: int | None = None
    scheme: str | None = None
    damping: float | None = None
    rank_bound: int | None = None
    tokens: int | None = None
    error_before: float | None = None
    error_after: float | None = None
    skipped: str | None = None
    notes: tuple[str, ...] = ()
    sha256: str | None = None
    smoothing: Mapping[str, Any] | None = None
    pruning: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class StepRecord:
    """One step of a recipe and everything it did, layer by layer.

    Attributes:
        replaced: {name in the file: SHA-256 of its bytes} of tensors that were changed beside the quantized weights.
    """

    kind: str
    settings: Mapping[str, Any]
    layers: tuple[LayerRecord, ...] = ()
    calibration: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def quantizes(self) -> bool:
        """Whether its layers are to be stored in fewer bits; those of the other kind, "prune", have `pruning`."""
        return self.kind == "quantize"

    @property
    def layers_quantized(self) -> int:
        return sum(layer.skipped is None for layer in self.layers) if self.quantizes else 0

    @property
    def layers_skipped(self) -> int:
        return sum(layer.skipped is not None for layer in self.layers) if self.quantizes else 0

    @property
    def fallback(self) -> tuple[LayerRecord, ...]:
        """Layers that were to be quantized by one algorithm and were quantized by another.

        Layers of a target that knows one algorithm only, among others that know more, are none of them, and neither
        are the `uncalibrated` ones.
        """
        asked = self.settings.get("algorithm")
        return tuple(
            layer
            for layer in self.layers
            if layer.algorithm not in (None, asked)
            and layer.tokens != 0
            and (layer.target not in TARGETS or asked in TARGETS[layer.target].algorithms)
        )

    @property
    def uncalibrated(self) -> tuple[LayerRecord, ...]:
        """Layers that calibration was asked for and that no token reached: experts, which are rounded to nearest."""
        asked = self.settings.get("algorithm")
        return tuple(layer for layer in self.layers if layer.tokens == 0 and layer.algorithm not in (None, asked))

    @property
    def layers_uncalibrated(self) -> int:
        return len(self.uncalibrated)

    @property
    def layers_fallback(self) -> int:
        return len(self.fallback)


@dataclass(frozen=True)
class Interval:
    """A confidence interval and how it was made."""

    low: float
    high: float
    level: float
    method: str


@dataclass(frozen=True)
class Measurement:
    """One measured number. Its unit, direction and definition stand in `compress.metrics` under `metric`.

    Attributes:
        metric: id in the table of metrics ("kl.mean").
        subject: what was measured: "original", "result", or "result/original" for paired figures.
        value: never rounded; None when it could not be measured (then `note` says why).
        count: independent items behind the value (tokens, blocks, files).
        one_sided: bounds for gates: {0.95: (lower 95 % bound, upper 95 % bound)}, each one-sided.
        conditions: device, dtype, engine, threads, batch, lengths: what the number holds for.
        task: the task it was measured on; None for what is no matter of tasks, and for what is pooled over them.
    """

    metric: str
    subject: str
    value: float | None
    count: int | None = None
    interval: Interval | None = None
    one_sided: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None
    task: str | None = None


@dataclass(frozen=True)
class FlipRecord:
    """An item that one model answers right and the other wrong.

    Attributes:
        id: the item's, unique in its task.
        question, expected: what was asked and the right answer, as text.
        original, result: what the two models answered, as text.
        original_margin, result_margin: score of the right choice minus that of the best wrong one, nats (of acc_norm
            per character), in the score that decides; None
            where answers are generated.
    """

    id: str
    question: str
    expected: str
    original: str
    result: str
    lost: bool
    original_margin: float | None = None
    result_margin: float | None = None


@dataclass(frozen=True)
class TaskRecord:
    """One task that both models answered.

    Attributes:
        kind: "multiple_choice", "cloze", "exact_match" or "classification".
        metric: what counts as right: "acc", "acc_norm", "exact_match" or another metric of lm-eval.
        chance: accuracy of guessing, 0..1; None where guessing is hopeless or unknown.
        detectable_drop: smallest true drop in points that so many items find in 80 of 100 runs, at the flips that were
            seen, or as many as the drop needs (see compress.power); None where they find none.
        flips: the worst flips, losses first.
    """

    name: str
    kind: str
    metric: str
    source: str
    items: int
    chance: float | None
    losses: int
    gains: int
    detectable_drop: float | None
    sha256: str | None = None
    flips: tuple[FlipRecord, ...] = ()
