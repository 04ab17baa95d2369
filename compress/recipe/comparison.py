"""What `compress eval` and `compress bench` are asked: two models side by side, what is measured, the gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator

from compress.errors import UsageError
from compress.recipe.bench import Bench
from compress.recipe.evaluate import Evaluate
from compress.recipe.fields import Gates, Reports, Text
from compress.recipe.gates import Gate
from compress.recipe.measured import read_gates
from compress.recipe.origin import Fault, Origin
from compress.recipe.section import Section


class Comparison(Section):
    """Two models that are there already, and what is measured about them."""

    original: Text
    """Folder of the original, or hub id, or hub id@revision."""
    result: Text | None = None
    """Folder of the compressed model, or hub id. Null: the original alone (`bench`)."""
    output: Text | None = None
    """Folder of the report. Null: none is written."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Start of every random number."""
    evaluate: Evaluate | None = None
    """What is measured about the answers."""
    bench: Bench | None = None
    """What is measured about speed and memory."""
    gates: Gates = ()
    """Conditions on the result."""
    report: Reports = ("json", "md", "html", "junit")
    """Files that the report is written to."""

    _origin: Origin = PrivateAttr(default=Origin())

    def error(self, faults: Sequence[Fault]) -> UsageError:
        """An error that names the option of every fault; see `Recipe.error`."""
        return self._origin.error(faults)

    def traced(self, origin: Origin) -> Self:
        """The same comparison, knowing which option set what."""
        copy = self.model_copy()
        copy._origin = origin
        return copy

    @field_validator("gates", mode="plain")
    @classmethod
    def _gates(cls, value: Any, info: ValidationInfo) -> tuple[Gate, ...]:
        return read_gates(cls.__name__, value, info.data)
