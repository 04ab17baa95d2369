"""Recipe version 1 as frozen models. The docstring under a field is its description in the JSON Schema.

Types, ranges and what follows from other values of the same recipe are checked here; `sentences.py` words
what pydantic finds, and `origin.py` knows the line or the option of every value.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    model_validator,
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
from compress.recipe.prune import Prune
from compress.recipe.quantize import Quantize
from compress.recipe.section import Section


class Calibration(Section):
    """The text that quantization and pruning are fitted to."""

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

    prune: Prune | None = None
    """Take feed-forward channels, attention heads or whole layers out of the model."""
    quantize: Quantize | None = None
    """Store the weights of the linear layers in fewer bits."""

    @model_validator(mode="after")
    def _one_thing(self) -> Self:
        named = [name for name, value in self if value is not None]
        if len(named) != 1:
            raise rule("must be one of prune and quantize, such as `- quantize: {target: int4}`")
        return self


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
    """The text that quantization and pruning are fitted to."""
    steps: Annotated[tuple[Step, ...], Strict(False)] = Field(json_schema_extra={"minItems": 1, "maxItems": 2})
    """What is done to the model, in this order: a `prune` step, a `quantize` step, or both."""
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

    @property
    def prune(self) -> Prune | None:
        """The step that prunes, if there is one."""
        return next((step.prune for step in self.steps if step.prune is not None), None)

    @property
    def quantize(self) -> Quantize | None:
        """The step that quantizes, if there is one."""
        return next((step.quantize for step in self.steps if step.quantize is not None), None)

    def with_step(self, changed: Prune | Quantize) -> Self:
        """The same recipe with another step of this kind in the place of its own."""
        name = "prune" if isinstance(changed, Prune) else "quantize"
        kept = [
            Step.model_validate({name: changed}) if getattr(step, name) is not None else step for step in self.steps
        ]
        return self.model_copy(update={"steps": tuple(kept)})

    def step_path(self, name: Literal["prune", "quantize"]) -> tuple[str | int, ...]:
        """Where the step stands, for `error`: ("steps", 1, "quantize")."""
        index = next((index for index, step in enumerate(self.steps) if getattr(step, name) is not None), 0)
        return ("steps", index, name)

    @field_validator("steps", mode="wrap")
    @classmethod
    def _in_order(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> tuple[Step, ...]:
        """Refuses second steps of a kind and steps out of order, beside whatever else is wrong with the steps."""
        items = value if isinstance(value, list | tuple) else ()
        surplus = _misplaced(items)
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


def _misplaced(items: Sequence[Any]) -> list[InitErrorDetails]:
    """Second steps of a kind, and a prune step that comes after quantization."""
    seen: set[str] = set()
    faults = []
    for index, item in enumerate(items):
        name = next((name for name in ("prune", "quantize") if _does(item, name)), None)
        if name is None:
            continue
        if name in seen:
            again = rule(f"is a second {name} step; a recipe of this version has at most one")
            faults.append(located(again, (index,), item))
        elif "quantize" in seen:
            late = rule("comes after the quantize step, and quantized weights cannot be pruned: put it before")
            faults.append(located(late, (index,), item))
        seen.add(name)
    return faults


def _does(item: Any, name: str) -> bool:
    if isinstance(item, Step):
        return getattr(item, name) is not None
    return isinstance(item, dict) and item.get(name) is not None


def _again(details: Any) -> InitErrorDetails:
    """An error of pydantic's as one that can be raised together with others."""
    kind = PydanticCustomError(details["type"], details["msg"], details.get("ctx"))
    return InitErrorDetails(type=kind, loc=details["loc"], input=details["input"])
