"""Recipe version 1 as frozen models. The docstring under a field is its description in the JSON Schema.

Types, ranges and what follows from other values of the same recipe are checked here; `sentences.py` words
what pydantic finds, and `origin.py` knows the line or the option of every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PrivateAttr,
    Strict,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from compress.errors import UsageError
from compress.recipe.fields import (
    Count,
    EngineName,
    Gates,
    Positive,
    Reports,
    Seconds,
    Several,
    Text,
    VersionNumber,
    located,
    read_gate,
    rule,
)
from compress.recipe.gates import Gate
from compress.recipe.origin import Fault, Origin
from compress.recipe.quantize import Quantize
from compress.recipe.section import Section
from compress.recipe.words import shown

MEASURED_BY: Mapping[str, Literal["evaluate", "bench"] | None] = {
    "kl": "evaluate",
    "top1": "evaluate",
    "perplexity": "evaluate",
    "cosine": "evaluate",
    "latency": "bench",
    "memory": "bench",
    "size": None,
    "bits_per_weight": None,
    "parameters": None,
}
"""Family of a metric (its id up to the first dot) -> the section that measures it; None: it always is."""


class Calibration(Section):
    """The text that quantization is fitted to."""

    source: Text = "default"
    """Text inside the package (`default`), a .txt, .jsonl or .parquet file, or a hub data set as
    NAME[/CONFIG][:SPLIT][#COLUMN]."""
    samples: Positive = 128
    """Number of windows of text."""
    length: Positive = 512
    """Tokens in each window."""
    batch_size: Positive = 1
    """Windows on the device together; each is computed alone, so it never changes the result."""


class Step(Section):
    """One thing that is done to the model."""

    quantize: Quantize
    """Store the weights of the linear layers in fewer bits."""


class Fidelity(Section):
    """Comparison with the original on held-out text."""

    source: Text = "default"
    """Where the text comes from, as in `calibration`. Text that is in both is an error."""
    tokens: Count = 16_384
    """Number of tokens, such as 16384 or 16k."""
    length: Several = 512
    """Tokens in each window; the first one of a window is not predicted."""


class Evaluate(Section):
    """What is measured about the result's answers."""

    fidelity: Fidelity = Fidelity()
    """Perplexity, KL divergence and top-1 agreement of a decoder, cosine similarity of an encoder."""


class Bench(Section):
    """What is measured about the result's speed and memory."""

    prompt: Positive = 128
    """Tokens in the prompt."""
    new_tokens: Several = 48
    """Tokens to generate; the time per output token needs two."""
    batch: Positive = 1
    """Prompts computed together."""
    seconds: Seconds = 60.0
    """Time to measure for, such as 60 or 60s."""
    engine: EngineName = "auto"
    """What runs the models. auto: stock transformers where it loads the format, else the dequantized weights."""


class Recipe(Section):
    """What `compress run` does: one model, the steps, what is measured, and the gates on the result."""

    version: VersionNumber
    """Version of the recipe language."""
    model: Text
    """Folder of the model, or hub id, or hub id@revision."""
    output: Text | None = None
    """Folder to write. Null: ./<model name>-<target>."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Start of every random number."""
    calibration: Calibration = Calibration()
    """The text that quantization is fitted to."""
    steps: Annotated[tuple[Step, ...], Strict(False)] = Field(json_schema_extra={"minItems": 1, "maxItems": 1})
    """What is done to the model: exactly one `quantize` step."""
    evaluate: Evaluate | None = Evaluate()
    """Comparison with the original; null turns it off."""
    bench: Bench | None = None
    """Speed and memory; off unless given, `{}` for the defaults."""
    gates: Gates = ()
    """Conditions on the result: METRIC OP VALUE[UNIT] [@LEVEL%], such as `kl.mean <= 0.1`."""
    report: Reports = ("json", "md")
    """Files that the report is written to."""

    _origin: Origin = PrivateAttr(default=Origin())

    def error(self, faults: Sequence[Fault]) -> UsageError:
        """An error that names the line or the option of every fault, for what is found out after loading.

        Args:
            faults: (path, sentence), the path as keys and indices: ("steps", 0, "quantize", "skip", 1).
        """
        return self._origin.error(faults)

    def traced(self, origin: Origin) -> Self:
        """The same recipe, knowing where its values were written."""
        gates = tuple(replace(gate, line=origin.line(("gates", index))) for index, gate in enumerate(self.gates))
        copy = self.model_copy(update={"gates": gates})
        copy._origin = origin
        return copy

    @field_validator("steps", mode="wrap")
    @classmethod
    def _one_step(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> tuple[Step, ...]:
        """Refuses every quantize step but the first, beside whatever else is wrong with the steps."""
        items = value if isinstance(value, list | tuple) else ()
        quantize = [index for index, item in enumerate(items) if isinstance(item, Step | dict) and _quantizes(item)]
        again = rule("is a second quantize step; a recipe of this version has exactly one")
        surplus = [located(again, (index,), items[index]) for index in quantize[1:]]
        try:
            steps: tuple[Step, ...] = handler(value)
        except ValidationError as error:
            if not surplus:
                raise
            found = [_again(details) for details in error.errors()]
            raise ValidationError.from_exception_data(cls.__name__, found + surplus) from error
        if surplus:
            raise ValidationError.from_exception_data(cls.__name__, surplus)
        if not steps:
            raise rule("must have one step, such as `- quantize: {target: int4}`")
        return steps

    @field_validator("gates", mode="plain")
    @classmethod
    def _gates(cls, value: Any, info: ValidationInfo) -> tuple[Gate, ...]:
        if not isinstance(value, list | tuple):
            raise rule(f"must be a list of gates such as `kl.mean <= 0.1`, not {shown(value)}")
        off = {section for section in ("evaluate", "bench") if info.data.get(section, "on") is None}
        gates, faults = [], []
        for index, item in enumerate(value):
            try:
                gates.append(_measured(read_gate(item), off))
            except PydanticCustomError as error:
                faults.append(located(error, (index,), item))
        if faults:
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return tuple(gates)

    @field_validator("report")
    @classmethod
    def _no_report_twice(cls, report: tuple[str, ...]) -> tuple[str, ...]:
        twice = next((name for name in report if report.count(name) > 1), None)
        if twice:
            raise rule(f"lists {twice} twice")
        return report


def _quantizes(step: Step | dict[Any, Any]) -> bool:
    return isinstance(step, Step) or "quantize" in step


def _measured(gate: Gate, off: set[str]) -> Gate:
    section = MEASURED_BY[gate.metric.split(".")[0]]
    if section in off:
        raise rule(
            f"gate `{gate.expression}`: `{gate.metric}` is measured by `{section}`, which is off: "
            f"turn it on (`{section}: {{}}` in a recipe) or remove the gate"
        )
    return gate


def _again(details: Any) -> InitErrorDetails:
    """An error of pydantic's as one that can be raised together with others."""
    kind = PydanticCustomError(details["type"], details["msg"], details.get("ctx"))
    return InitErrorDetails(type=kind, loc=details["loc"], input=details["input"])
