"""The report as data: frozen, versioned, and the one source of every rendering.

A number here is the number that was measured: rounding happens only where text is made. JSON has no NaN and no
infinity: what could not be measured is `null`, and a note says why.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Literal[1] = 1

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Part(BaseModel):
    """Base of all parts: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Tool(Part):
    name: str = "compress"
    version: str


class IntervalPart(Part):
    """A confidence interval; `level` is a share (0.95), `method` says how it was made."""

    low: Finite
    high: Finite
    level: Finite
    method: str


class BoundPart(Part):
    """One-sided bounds at `level`: the true value is above `lower` (or below `upper`) with that confidence."""

    level: Finite
    lower: Finite | None
    upper: Finite | None


class MeasurementPart(Part):
    """One measured number with everything needed to read it; see `compress.records.Measurement`."""

    metric: str
    subject: str
    value: Finite | None
    unit: str
    better: Literal["lower", "higher", "none"]
    definition: str
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


class Totals(Part):
    layers_quantized: int
    layers_skipped: int
    layers_fallback: int
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


class Inputs(Part):
    model: ModelPart
    calibration: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None


class Reproduce(Part):
    """How to use the result and how to get it again: shell commands and Python lines."""

    command: str | None = None
    load: tuple[str, ...] = ()


class Report(Part):
    """Everything a run found out. The verdict first, then the numbers, then how they came about."""

    schema_version: Literal[1] = SCHEMA_VERSION
    tool: Tool
    created: str | None = None
    verdict: VerdictPart
    measurements: tuple[MeasurementPart, ...] = ()
    remarks: tuple[str, ...] = ()
    steps: tuple[StepPart, ...] = ()
    proof: dict[str, Any] | None = None
    inputs: Inputs
    recipe: dict[str, Any] | None = None
    environment: dict[str, Any] = {}
    output: str
    reproduce: Reproduce = Reproduce()


def report_json(report: Report) -> str:
    """The content of report.json: indented, with a final newline."""
    return report.model_dump_json(indent=2) + "\n"
