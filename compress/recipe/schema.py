"""Recipe version 1 as frozen models. The docstring under a field is its description in the JSON Schema.

Types, ranges and what follows from other values of the same recipe are checked here; `sentences.py` words
what pydantic finds, and `origin.py` knows the line or the option of every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

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
from compress.recipe.bench import Bench
from compress.recipe.evaluate import Evaluate
from compress.recipe.fields import (
    Gates,
    Positive,
    Reports,
    Text,
    VersionNumber,
    located,
    rule,
)
from compress.recipe.gates import Gate
from compress.recipe.measured import read_gates
from compress.recipe.origin import Fault, Origin
from compress.recipe.quantize import Quantize
from compress.recipe.section import Section


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


class Recipe(Section):
    """What `compress run` does: one model, the steps, what is measured, and the gates on the result."""

    version: VersionNumber
    """Version of the recipe language."""
    model: Text
    """Folder of the model, or hub id, or hub id@revision."""
    dequantize: bool = False
    """Start from the dequantized weights of a model that is quantized already (compressed-tensors or GPTQ)."""
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
    report: Reports = ("json", "md", "html", "junit")
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
        return read_gates(cls.__name__, value, info.data)


def _quantizes(step: Step | dict[Any, Any]) -> bool:
    return isinstance(step, Step) or "quantize" in step


def _again(details: Any) -> InitErrorDetails:
    """An error of pydantic's as one that can be raised together with others."""
    kind = PydanticCustomError(details["type"], details["msg"], details.get("ctx"))
    return InitErrorDetails(type=kind, loc=details["loc"], input=details["input"])
