"""Text from outside, made harmless to show: names of models, data and files, items of tasks, notes of libraries.

`visible` is applied once, where a report is made or read. What is markup differs between renderers, so each escapes its
own. Commands to a CI system, which reads what a job prints line by line, are taken apart where text is written:

- GitHub takes a line that starts with `::`, white space aside, and `##[` anywhere in a line
  (actions/runner, src/Runner.Common/ActionCommand.cs); Azure takes `##vso[`, TeamCity `##teamcity[`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

KEPT = "\n\t"
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that show nothing and change what is around them: control, format (zero width, direction),
surrogates, separators of lines and paragraphs."""
COLOUR = r"(?:\x1b\[[0-9;]*m)*"
LINE_COMMAND = re.compile(rf"^({COLOUR}[^\S\n]*{COLOUR}):(?=:)", re.MULTILINE)
INLINE_COMMAND = re.compile(r"##(?=\w*\[)")


def visible(text: str) -> str:
    r"""`text` with everything that shows nothing as an escape: `\x1b`, `\u202e`, `\ud800`. Lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(escape(char) if unseen(char) else char for char in text)


def unseen(char: str) -> bool:
    if char.isprintable() or char in KEPT:
        return False
    point = ord(char)
    return unicodedata.category(char) in UNSEEN or point & 0xFFFE == 0xFFFE or 0xFDD0 <= point <= 0xFDEF


def escape(char: str) -> str:
    point = ord(char)
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def cleaned(value: Any) -> Any:
    """`value` with every text in it made visible, keys too; what is no mapping, list, tuple or text stays as it is."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(cleaned(item) for item in value)
    return value


def single_line(text: str) -> str:
    """`text` with runs of white space, line ends among them, made one space."""
    return " ".join(text.split())


def defused(text: str) -> str:
    r"""Plain text without commands to a CI system: `\x3a:error::`, `#\x23[error]`."""
    return INLINE_COMMAND.sub(r"#\\x23", LINE_COMMAND.sub(r"\1\\x3a", text))


def defused_json(text: str) -> str:
    r"""The same JSON value without commands: they can only stand in strings, where `#` may be written `\u0023`."""
    return INLINE_COMMAND.sub(r"#\\u0023", text)


def defused_markup(text: str) -> str:
    """The same HTML, XML or Markdown (outside code) without commands: characters as numbers."""
    return INLINE_COMMAND.sub("#&#35;", LINE_COMMAND.sub(r"\1&#58;", text))
