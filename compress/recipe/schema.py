"""Recipe version 1 as frozen models. The docstring under a field is its description in the JSON Schema.

Only types, ranges and what follows from other values of the same recipe are checked here; `sentences.py` words what
pydantic finds, and `origin.py` knows the line or the option of every value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    Strict,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from compress.errors import UsageError
from compress.metrics import METRICS
from compress.recipe.gates import Gate, parse_gate
from compress.recipe.origin import Fault, OptionOrigin, Origin
from compress.recipe.units import parse_count, parse_seconds, parse_size, write_size
from compress.recipe.words import did_you_mean, one_of, shown
from compress.scheme import AUTO_GROUP_SIZES, PER_CHANNEL, TARGETS

VERSION = 1
RULE = "rule"
"""Type of the pydantic errors whose message is already the sentence for the user."""

FORMATS = tuple(dict.fromkeys(name for target in TARGETS.values() for name in target.formats))

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
"""Family of a metric (its id up to the first dot) -> the section of the recipe that measures it; None: always."""


def _rule(sentence: str) -> PydanticCustomError:
    return PydanticCustomError(RULE, "{sentence}", {"sentence": sentence})


def _checked[Value](check: Callable[[Any], Value]) -> Callable[[Any], Value]:
    """`check` with its UsageError in the form that pydantic collects."""

    def validate(value: Any) -> Value:
        try:
            return check(value)
        except UsageError as error:
            raise _rule(error.message) from error

    return validate
