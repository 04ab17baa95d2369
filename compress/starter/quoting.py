"""Text from outside as YAML scalars, so that no name can become a key, a comment, or an expression of a CI system."""

from __future__ import annotations

import json
import re

from compress.errors import UsageError
from compress.recipe.document import scalar

_PLAIN = re.compile(r"[A-Za-z./][A-Za-z0-9_./@-]*")
_OLD_BOOLEANS = {"y", "n", "yes", "no", "on", "off"}
"""YAML 1.1 reads them as booleans, and some editors still do."""
_EXPRESSION = "${{"


def plain_or_quoted(text: str) -> str:
    """A YAML scalar that reads back as `text`, without quotes where none are needed. Raises as `quoted` does."""
    plain = _PLAIN.fullmatch(text) and scalar(text) == text and text.lower() not in _OLD_BOOLEANS
    return text if plain else quoted(text)


def quoted(text: str) -> str:
    """A double-quoted YAML scalar on one line.

    Raises:
        UsageError: the text has half a character (a file name that is no UTF-8), which no YAML file can hold.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{text!r} is not valid Unicode, and a recipe is UTF-8: it cannot name this.",
            hint="Rename the file or folder.",
        ) from error
    # JSON strings are YAML ones, but JSON leaves characters as they are that YAML must see escaped.
    return "".join(_escaped(character) for character in json.dumps(text, ensure_ascii=False))


def github_text(text: str) -> str:
    """The same for a workflow of GitHub, which looks for expressions inside of every scalar."""
    return quoted(text.replace(_EXPRESSION, "${{ '${{' }}"))


def _escaped(character: str) -> str:
    code = ord(character)
    if character.isprintable() and character != "\ufeff":
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
