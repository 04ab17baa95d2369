"""What pydantic finds wrong with a recipe, as sentences for its author."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from compress.recipe.fields import RULE
from compress.recipe.origin import Fault, Path, dotted
from compress.recipe.schema import Step
from compress.recipe.section import Section
from compress.recipe.words import nearest, one_of, quotes_hint, shown


def describe(error: ValidationError, top: type[Section]) -> tuple[list[Fault], frozenset[Path]]:
    """Every fault as path and sentence, and the paths that are wrong as keys rather than for their values.

    Args:
        top: the model that was validated.
    """
    found = error.errors(include_url=False)
    unknown = [details["loc"] for details in found if details["type"] == "extra_forbidden"]
    faults = [
        (details["loc"], _sentence(details, top))
        for details in found
        if not (details["type"] == "missing" and _misspelt(details["loc"], unknown, top))
    ]
    return faults, frozenset(unknown)


def section_at(path: Path, top: type[Section]) -> type[Section] | None:
    """The model of the map at `path`; None where there is no map."""
    section: type[Section] | None = top
    for part in path:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if section else None
        section = _section_in(field.annotation) if field else None
    return section


def _section_in(annotation: Any) -> type[Section] | None:
    """The model inside `Model`, `Model | None` or `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _sentence(details: ErrorDetails, top: type[Section]) -> str:
    kind, path, value = details["type"], details["loc"], details["input"]
    context: Mapping[str, Any] = details.get("ctx", {})
    if kind == RULE:
        return str(context["sentence"])
    if kind == "extra_forbidden":
        return _unknown_key(path, top)
    if kind == "missing":
        return _missing(path, top)
    if kind == "invalid_key":
        return "a key must be text"
    if kind == "string_pattern_mismatch":
        return "must not be empty"
    rule = _rule(kind, path, top)
    return f"must be {rule}, not {shown(value)}{_hint(kind, value)}" if rule else details["msg"]


def _rule(kind: str, path: Path, top: type[Section]) -> str | None:
    """What the value at `path` must be, after an error of this kind."""
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        section = section_at(path, top)
        keys = ", ".join(section.model_fields) if section else ""
        optional = bool(path) and type(None) in get_args(_field_at(path, top).annotation)
        return f"a map with the keys {keys}{', or null' if optional else ''}"
    if kind in ("tuple_type", "list_type"):
        return "a list"
    if kind in ("string_type", "bool_type"):
        return "text" if kind == "string_type" else "true or false"
    whole = kind.startswith("int_") or _field_at(path, top).annotation is int
    number = "a whole number" if whole else "a number"
    if kind in ("int_type", "int_from_float", "int_parsing_size", "float_type"):
        return number
    if kind == "finite_number":
        return "a finite number"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"{number} {_limits(_field_at(path, top))}"
    return None


def _hint(kind: str, value: Any) -> str:
    if kind in ("int_type", "float_type"):
        return quotes_hint(value)
    if kind == "string_type" and isinstance(value, bool | int | float):
        return ": put quotes around it"
    if kind == "tuple_type" and isinstance(value, str):
        return f": write [{value}]"
    return ""


def _limits(field: FieldInfo) -> str:
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    found = [
        f"{phrase} {getattr(limit, name)}"
        for limit in field.metadata
        for name, phrase in words.items()
        if isinstance(limit, getattr(annotated_types, name.capitalize()))
    ]
    return " and ".join(found)


def _missing(path: Path, top: type[Section]) -> str:
    field = _field_at(path, top)
    extra = field.json_schema_extra
    choices = extra.get("enum") if isinstance(extra, dict) else None
    values = f": {one_of(choices)}" if isinstance(choices, list) else ""
    return f"is missing. {(field.description or '').rstrip('.')}{values}"


def _unknown_key(path: Path, top: type[Section]) -> str:
    name, around = str(path[-1]), section_at(path[:-1], top)
    keys = list(around.model_fields) if around else []
    what, here = ("step", "Steps") if around is Step else ("key", "Keys")
    return f"unknown {what} `{name}`{_meant(name, keys, top)}. {here} here: {', '.join(keys)}"


def _meant(name: str, keys: Sequence[str], top: type[Section]) -> str:
    """One of the keys here, unless another map has one that is nearer to `name`."""
    everywhere = list(_all_keys(top, ""))
    near, far = nearest(name, keys), nearest(name, {key for _, key in everywhere})
    if near and far and nearest(name, [near, far]) == near:
        return f" (did you mean `{near}`?)"
    if not far:
        return ""
    homes = [f"`{above}`" if above else "the top level" for above, key in everywhere if key == far]
    return f" (did you mean `{far}` under {one_of(homes)}?)"


def _all_keys(section: type[Section], above: str) -> Iterator[tuple[str, str]]:
    """(dotted path of the map, key) for every key of a document."""
    for name, field in section.model_fields.items():
        yield above, name
        inner = _section_in(field.annotation)
        if inner:
            item = "[]" if str(field.annotation).startswith("tuple") else ""
            yield from _all_keys(inner, f"{above}.{name}{item}".removeprefix("."))


def _misspelt(missing: Path, unknown: Sequence[Path], top: type[Section]) -> bool:
    """Whether an unknown key beside the missing one already tells what is wrong."""
    around = section_at(missing[:-1], top)
    keys = list(around.model_fields) if around else []
    beside = [str(path[-1]) for path in unknown if path[:-1] == missing[:-1]]
    return any(len(keys) == 1 or nearest(name, keys) == missing[-1] for name in beside)


def _field_at(path: Path, top: type[Section]) -> FieldInfo:
    """The field that holds the value at `path`, or the list that the value is an item of."""
    names = [part for part in path if isinstance(part, str)]
    section = section_at(tuple(names[:-1]), top)
    if section is None:
        raise LookupError(f"{dotted(path)} is no field of a recipe")
    return section.model_fields[names[-1]]
