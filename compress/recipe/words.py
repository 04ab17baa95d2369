"""Small pieces of error sentences."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, ignoring case and `-` for `_`, or None."""
    plain = {_plain(candidate): candidate for candidate in known}
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.65)
    return plain[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A space and "(did you mean `kl.mean`?)", or nothing."""
    near = nearest(word, known)
    return f" (did you mean `{near}`?)" if near else ""


def one_of(choices: Sequence[object]) -> str:
    """A list as a phrase: "a, b or c"."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def shown(value: object) -> str:
    """A value of a YAML document as its writer knows it."""
    if value is None:
        return "an empty value"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'the text "{value if len(value) <= 60 else value[:57] + "..."}"'
    if isinstance(value, int | float):
        return f"`{value}`"
    return "a map" if isinstance(value, dict) else "a list"


def quotes_hint(value: object) -> str:
    """ ": remove the quotes" after a number that was written as text, else nothing."""
    return ": remove the quotes" if isinstance(value, str) and _NUMBER.fullmatch(value) else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
