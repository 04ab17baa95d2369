"""The section `bench` of a recipe: what is measured about speed and memory."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Strict, WithJsonSchema

from compress.recipe.fields import EngineName, Positive, Precision, Seconds, Several, rule
from compress.recipe.section import Section
from compress.recipe.words import quotes_hint, shown


def _one_or_many(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return value
    if type(value) is not int:
        raise rule(f"must be a whole number or a list of them, not {shown(value)}{quotes_hint(value)}")
    return (value,)


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
    tuple[Positive, ...],
    Strict(False),
    BeforeValidator(_one_or_many),
    AfterValidator(_no_number_twice),
    WithJsonSchema(_schema(1)),
]
Severals = Annotated[
    tuple[Several, ...],
    Strict(False),
    BeforeValidator(_one_or_many),
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
