"""The report as data: frozen, versioned, and the one source of every rendering.

A number here is the number that was measured: rounding happens only where text is made. JSON has no NaN and no
infinity: what could not be measured is `null`, and a note says why.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compress.errors import EXIT_GATE_FAILED, EXIT_INCONCLUSIVE, EXIT_NOISY_MACHINE, EXIT_OK
from compress.report.clean import cleaned, defused_json

SCHEMA_VERSION: Literal[2] = 2

EXIT_CODES = {
    "PASS": (EXIT_OK,),
    "FAIL": (EXIT_GATE_FAILED,),
    "INCONCLUSIVE": (EXIT_INCONCLUSIVE, EXIT_NOISY_MACHINE),
}
Command = Literal["run", "eval", "bench"]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]


class Part(BaseModel):
    """Base of all parts: frozen, an unknown key is an error, and no text holds what a reader cannot see."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _visible(cls, data: Any) -> Any:
        return cleaned(data)


class Tool(Part):
    name: str = "compress"
    version: str


class IntervalPart(Part):
    """A confidence interval; `level` is a share (0.95), `method` says how it was made."""

    low: Finite
    high: Finite
    level: Finite
    method: str

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"the interval ends before it begins: {self.low}, {self.high}")
        return self


class BoundPart(Part):
    """One-sided bounds at `level`: the true value is above `lower` (or below `upper`) with that confidence."""

    level: Finite
    lower: Finite | None
    upper: Finite | None


class MeasurementPart(Part):
    """One measured number with everything needed to read it; see `compress.records.Measurement`."""

    metric: str
    subject: str
    task: str | None = None
    value: Finite | None
    unit: str
    better: Literal["lower", "higher", "none"]
    definition: str
    definition_id: str
    count: int | None = None
    interval: IntervalPart | None = None
    one_sided: tuple[BoundPart, ...] = ()
    conditions: dict[str, Any] = {}
    note: str | None = None


class GatePart(Part):
    """One gate as asked and as judged.

    Attributes:
        expression: as the user wrote it.
        value: what was measured, in `unit`; None when there was no such measurement.
        line: line of the gate in the recipe file, counted from 1; None for gates of the command line.
    """

    expression: str
    metric: str
    task: str | None = None
    outcome: Literal["PASS", "FAIL", "INCONCLUSIVE"]
    value: Finite | None
    unit: str
    threshold: Finite | None
    level: Finite | None = None
    bound: BoundPart | None = None
    interval: IntervalPart | None = None
    reason: str
    line: int | None = None


class VerdictPart(Part):
    outcome: Literal["PASS", "FAIL", "INCONCLUSIVE"]
    headline: str
    exit_code: int
    gates: tuple[GatePart, ...] = ()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        """A report that was edited must not end green with a gate that failed."""
        outcomes = [gate.outcome for gate in self.gates]
        worst = next((one for one in ("FAIL", "INCONCLUSIVE") if one in outcomes), "PASS")
        # No gate is worse than passed, but the machine was too noisy or the benchmark did not finish.
        open_end = worst == "PASS" and self.outcome == "INCONCLUSIVE"
        if self.exit_code == EXIT_NOISY_MACHINE and worst != "PASS":
            raise ValueError(f"exit code {self.exit_code} stands for noise alone, and a gate is {worst}")
        if self.exit_code not in EXIT_CODES[self.outcome] or (self.outcome != worst and not open_end):
            raise ValueError(
                f"outcome {self.outcome}, exit code {self.exit_code} and gates (worst: {worst}) contradict each other"
            )
        if not self.headline.startswith(self.outcome):
            raise ValueError(f"the headline does not begin with the outcome, {self.outcome}")
        return self


class FlipPart(Part):
    """An item that one model answers right and the other wrong; see `compress.records.FlipRecord`."""

    id: str
    question: str
    expected: str
    original: str
    result: str
    lost: bool
    original_margin: Finite | None = None
    result_margin: Finite | None = None


class TaskPart(Part):
    """One task that both models answered; see `compress.records.TaskRecord`. Its figures are among the measurements."""

    name: str
    kind: str
    metric: str
    source: str
    items: int
    chance: Finite | None
    losses: int
    gains: int
    detectable_drop: Finite | None
    sha256: str | None = None
    flips: tuple[FlipPart, ...] = ()


class PruningPart(Part):
    """Which units of a projection stay, and what their loss did to it; see `compress.records.LayerRecord`.

    Attributes:
        drift_ridge, residual_share: how the drift of earlier layers was corrected; None where it was not.
    """

    unit: str
    of: int
    kept: tuple[int, ...]
    ridge: Finite | None = None
    drift_ridge: Finite | None = None
    residual_share: Finite | None = None
    error_masked: Finite | None = None
    error_predicted: Finite | None = None
    error_fitted: Finite | None = None
    error_measured: Finite | None = None


class LayerPart(Part):
    """What was done to one layer; see `compress.records.LayerRecord` for every field."""

    name: str
    shape: tuple[int, ...]
    target: str | None = None
    algorithm: str | None = None
    group_size: int | None = None
    scheme: str | None = None
    damping: Finite | None = None
    rank_bound: int | None = None
    tokens: int | None = None
    error_before: Finite | None = None
    error_after: Finite | None = None
    skipped: str | None = None
    notes: tuple[str, ...] = ()
    sha256: str | None = None
    smoothing: dict[str, Any] | None = None
    pruning: PruningPart | None = None


class Totals(Part):
    layers_quantized: int
    layers_skipped: int
    layers_fallback: int
    layers_uncalibrated: int = 0
    calibration_tokens: int | None


class StepPart(Part):
    """One step; see `compress.records.StepRecord`."""

    kind: str
    settings: dict[str, Any]
    calibration: dict[str, Any]
    totals: Totals
    notes: tuple[str, ...] = ()
    replaced: dict[str, str] = {}
    layers: tuple[LayerPart, ...] = ()


class ModelPart(Part):
    """The model that went in.

    Attributes:
        source: as the user wrote it: a folder or a hub id.
        revision: the commit of a hub model; None for a folder.
        content_hash: SHA-256 over its config and weight files.
    """

    source: str
    revision: str | None = None
    content_hash: str | None = None
    model_type: str | None = None


class ServingPart(Part):
    """Whether a serving engine loads the result, told from its files alone; see `compress.plan.serving.Serving`."""

    engine: str
    loads: bool
    reasons: tuple[str, ...] = ()


class Inputs(Part):
    """What went in. `result` is the compressed model where it was there before: `compress eval` and `bench`."""

    model: ModelPart
    result: ModelPart | None = None
    calibration: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None


class Reproduce(Part):
    """How to use the result and how to get it again: shell commands and Python lines."""

    command: str | None = None
    load: tuple[str, ...] = ()


class Report(Part):
    """Everything a run found out. The verdict first, then the numbers, then how they came about.

    Attributes:
        command: what made the report: "run" (a recipe, or `quantize`), "eval" or "bench".
        output: the folder of the result, as the user named it.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    tool: Tool
    command: Command = "run"
    created: str | None = None
    verdict: VerdictPart
    measurements: tuple[MeasurementPart, ...] = ()
    tasks: tuple[TaskPart, ...] = ()
    remarks: tuple[str, ...] = ()
    steps: tuple[StepPart, ...] = ()
    proof: dict[str, Any] | None = None
    serving: tuple[ServingPart, ...] = ()
    inputs: Inputs
    recipe: dict[str, Any] | None = None
    environment: dict[str, Any] = {}
    output: str
    reproduce: Reproduce = Reproduce()


def report_json(report: Report) -> str:
    """The content of report.json: indented, with a final newline."""
    return defused_json(report.model_dump_json(indent=2)) + "\n"


def report_json_schema() -> dict[str, Any]:
    """The JSON Schema of report.json; committed as recipes/report.schema.json."""
    schema = Report.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
