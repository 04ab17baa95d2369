"""The section `bench` of a recipe: what is measured about speed and memory."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Strict, ValidationError, WithJsonSchema

from compress.recipe.fields import EngineName, Precision, Seconds, located, rule
from compress.recipe.section import Section
from compress.recipe.units import MAX_COUNT
from compress.recipe.words import quotes_hint, shown


def _numbers(least: int) -> BeforeValidator:
    """A whole number of at least `least`, or a list of them, as a tuple."""

    def check(value: Any) -> Any:
        listed = isinstance(value, list | tuple)
        faults = []
        for index, number in enumerate(value if listed else (value,)):
            if type(number) is not int or not least <= number <= MAX_COUNT:
                hint = quotes_hint(number)
                sentence = f"must be a whole number of at least {least}, not {shown(number)}{hint}"
                if not listed:
                    raise rule(
                        f"must be a whole number of at least {least} or a list of them, not {shown(value)}{hint}"
                    )
                faults.append(located(rule(sentence), (index,), number))
        if faults:
            raise ValidationError.from_exception_data("numbers", faults)
        return value if listed else (value,)

    return BeforeValidator(check)


def _no_number_twice(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values:
        raise rule("must name at least one number")
    if len(set(values)) < len(values):
        raise rule("lists a number twice")
    return values


def _schema(least: int) -> dict[str, Any]:
    number = {"type": "integer", "minimum": least, "maximum": 2**31 - 1}
    return {"anyOf": [number, {"type": "array", "items": number, "minItems": 1}]}


Positives = Annotated[
    tuple[int, ...],
    Strict(False),
    _numbers(1),
    AfterValidator(_no_number_twice),
    WithJsonSchema(_schema(1)),
]
Severals = Annotated[
    tuple[int, ...],
    Strict(False),
    _numbers(2),
    AfterValidator(_no_number_twice),
    WithJsonSchema(_schema(2)),
]


class Bench(Section):
    """What is measured about the result's speed and memory. Lists are swept: every combination is measured."""

    prompt: Positives = (128,)
    """Tokens in the prompt, or a list of them."""
    new_tokens: Severals = (48,)
    """Tokens to generate, or a list of them; the time per output token needs two."""
    batch: Positives = (1,)
    """Prompts computed together, or a list of them."""
    budget: Seconds = 60.0
    """Time to measure for, such as 60 or 60s; all combinations share it."""
    precision: Precision | None = None
    """Stop as soon as every ratio is known to this half-width, such as 2%; not reaching it within the budget is exit
    code 8. Null: the whole budget is used, and what it gives is reported."""
    engine: EngineName = "auto"
    """What runs the models. auto: stock transformers where it loads the format, else the dequantized weights."""

    @property
    def combinations(self) -> list[tuple[int, int, int]]:
        """(prompt, new tokens, batch) of everything that is measured."""
        return list(product(self.prompt, self.new_tokens, self.batch))
