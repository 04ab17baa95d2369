"""The types of recipe fields that pydantic does not have: choices, sizes, counts, group sizes, gates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, Strict, WithJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError

from compress.errors import UsageError
from compress.recipe.gates import Gate, parse_gate
from compress.recipe.units import (
    MAX_COUNT,
    MAX_SECONDS,
    parse_count,
    parse_quantity,
    parse_seconds,
    parse_share,
    parse_size,
    write_size,
)
from compress.recipe.words import did_you_mean, one_of, quotes_hint, shown
from compress.scheme import AUTO_GROUP_SIZES, PER_CHANNEL, TARGETS

RULE = "rule"
"""Type of the pydantic errors whose message is already the sentence for the user."""

QUANTIZED = tuple(name for name, target in TARGETS.items() if target.bits)
FORMATS = tuple(dict.fromkeys(name for target in TARGETS.values() for name in target.formats))

T = TypeVar("T")


def rule(sentence: str) -> PydanticCustomError:
    """A broken rule, in the form that pydantic collects."""
    return PydanticCustomError(RULE, "{sentence}", {"sentence": sentence})


def located(error: PydanticCustomError, path: tuple[str | int, ...], value: Any) -> InitErrorDetails:
    """A broken rule at `path` inside the value that a validator is called for."""
    return InitErrorDetails(type=error, loc=path, input=value)


def choice(allowed: Iterable[object]) -> BeforeValidator:
    choices = list(allowed)

    def check(value: Any) -> Any:
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        meant = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
        raise rule(f"must be {one_of(choices)}, not {shown(value)}{quotes_hint(value) or meant}")

    return BeforeValidator(check)


def _text_in(read: Callable[[str], T], example: str, *, numbers: Callable[[Any], bool]) -> PlainValidator:
    """Reads text with `read`; numbers that pass the check `numbers` stand for themselves."""

    def check(value: Any) -> T | Any:
        if isinstance(value, str):
            try:
                return read(value)
            except UsageError as error:
                raise rule(error.message) from error
        if numbers(value):
            return value
        raise rule(f"must be {example}, not {shown(value)}")

    return PlainValidator(check)


def _never(value: Any) -> bool:
    del value
    return False


def _positive_whole(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_COUNT


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= MAX_SECONDS


def _share(value: Any) -> bool:
    return (type(value) is float and 0 <= value <= 1) or (type(value) is int and value == 0)


def _half_width(value: Any) -> bool:
    return type(value) is float and 0 < value < 1


def _parse_half_width(text: str) -> float:
    share = parse_share(text)
    if not 0 < share < 1:
        raise UsageError(f"`{text.strip()}` must be above 0% and below 100%")
    return share


def _parse_factor(text: str) -> float:
    if "%" in text:
        raise UsageError(f"`{text.strip()}` must be a factor below 1 such as 0.8x")
    factor = parse_quantity(text, {"x": Decimal(1), "": Decimal(1)})
    if not 0 < factor < 1:
        raise UsageError(f"`{text.strip()}` must be above 0 and below 1")
    return float(factor)


def _check_keep(value: Any) -> int | float:
    """A count is a whole number; a share has a point or a percent sign."""
    written = value
    if isinstance(value, str):
        try:
            value = parse_share(value) if "." in value or "%" in value else int(value)
        except ValueError:
            value = None
        except UsageError as error:
            raise rule(error.message) from error
    if type(value) is int and 1 <= value <= MAX_COUNT:
        return value
    if type(value) is float and 0 < value < 1:
        return value
    told = "; leave it out to keep all" if type(value) is float and value == 1 else ""
    form = "a count of at least 1 such as 6, or a share between 0 and 1 such as 0.75 or 75%"
    raise rule(f"must be {form}, not {shown(written if value is None else value)}{told}")


def _check_group_size(value: Any) -> Any:
    if value is None or value == "auto" or (type(value) is int and (1 <= value <= MAX_COUNT or value == PER_CHANNEL)):
        return value
    sizes = one_of(sorted(AUTO_GROUP_SIZES))
    raise rule(
        f"must be auto, {PER_CHANNEL} (one scale per output channel) or a positive whole number "
        f"such as {sizes}, not {shown(value)}{quotes_hint(value)}"
    )


def _check_multiple(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MAX_COUNT):
        return value
    raise rule(f"must be auto or a positive whole number such as 64, not {shown(value)}{quotes_hint(value)}")


def _no_name_twice(names: tuple[str, ...]) -> tuple[str, ...]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise rule(f"lists {twice} twice")
    return names


def read_gate(value: Any) -> Gate:
    """A gate from the value of a recipe. Raises PydanticCustomError."""
    if isinstance(value, Gate):
        return value
    if not isinstance(value, str):
        raise rule(f"must be text such as `kl.mean <= 0.1`, not {shown(value)}")
    try:
        return parse_gate(value)
    except UsageError as error:
        raise rule(error.message) from error


Algorithm = Literal["gptq", "rtn"]
Engine = Literal["auto"]
Importance = Literal["obs", "magnitude", "activation", "taylor", "random"]
ReportFormat = Literal["json", "md", "html", "junit"]

Text = Annotated[str, Field(pattern=r"\S")]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Whole = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Several = Annotated[int, Field(ge=2, le=MAX_COUNT)]
Texts = Annotated[tuple[Text, ...], Strict(False)]

VersionNumber = Annotated[Literal[1], choice([1])]
TargetName = Annotated[str, choice(TARGETS), Field(json_schema_extra={"enum": list(TARGETS)})]
QuantizedName = Annotated[str, choice(QUANTIZED), Field(json_schema_extra={"enum": list(QUANTIZED)})]
FormatName = Annotated[str, choice(FORMATS), Field(json_schema_extra={"enum": list(FORMATS)})]
AlgorithmName = Annotated[Algorithm, choice(get_args(Algorithm))]
ImportanceName = Annotated[Importance, choice(get_args(Importance))]
EngineName = Annotated[Engine, choice(get_args(Engine))]
Reports = Annotated[
    tuple[Annotated[ReportFormat, choice(get_args(ReportFormat))], ...], Strict(False), AfterValidator(_no_name_twice)
]

Multiple = Annotated[
    Literal["auto"] | int,
    PlainValidator(_check_multiple),
    WithJsonSchema({"anyOf": [{"enum": ["auto"]}, {"type": "integer", "minimum": 1}]}),
]
GroupSize = Annotated[
    Literal["auto"] | int | None,
    PlainValidator(_check_group_size),
    WithJsonSchema({"anyOf": [{"enum": ["auto", PER_CHANNEL]}, {"type": "integer", "minimum": 1}, {"type": "null"}]}),
]
Size = Annotated[
    int,
    _text_in(parse_size, "a size with its unit such as 5GB", numbers=_never),
    PlainSerializer(write_size),
    WithJsonSchema({"type": "string", "pattern": r"^\s*[0-9.]+\s*(B|kB|MB|GB)\s*$"}),
]
Share = Annotated[
    float,
    _text_in(parse_share, "a share such as 5% or 0.05", numbers=_share),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.]+\s*%?\s*$"},
            ]
        }
    ),
]
Precision = Annotated[
    float,
    _text_in(_parse_half_width, "a share such as 2% or 0.02", numbers=_half_width),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.]+\s*%?\s*$"},
            ]
        }
    ),
]
Count = Annotated[
    int,
    _text_in(parse_count, "a positive whole number such as 16384 or 16k", numbers=_positive_whole),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.]+\s*[kM]?\s*$"},
            ]
        }
    ),
]
Seconds = Annotated[
    float,
    _text_in(parse_seconds, "a positive number of seconds such as 60 or 60s", numbers=_positive),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9.]+\s*(ms|s)\s*$"},
            ]
        }
    ),
]
KeepAmount = Annotated[
    int | float,
    PlainValidator(_check_keep),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.]+\s*%?\s*$"},
            ]
        }
    ),
]
Factor = Annotated[
    float,
    _text_in(_parse_factor, "a factor below 1 such as 0.8x", numbers=_half_width),
    PlainSerializer(lambda factor: f"{factor!r}x"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.]+\s*x?\s*$"},
            ]
        }
    ),
]
Gates = Annotated[
    tuple[Gate, ...],
    PlainSerializer(lambda gates: [gate.expression for gate in gates]),
    WithJsonSchema({"type": "array", "items": {"type": "string", "pattern": r"^\s*[^\s<>=]+\s*(<=|<|>=|>)\s*\S+"}}),
]
