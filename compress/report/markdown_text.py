"""Text for GitHub Markdown: what came from outside stays text, links nowhere and calls nobody.

GitHub looks for mentions and references in the rendered text, so entities do not hide them, but never inside of code:
`@` and `#` before a name or a number become code. Names and texts of items are code as a whole.
"""

from __future__ import annotations

import re
from typing import Any

from compress.report.clean import INLINE_COMMAND, LINE_COMMAND, defused_markup, single_line

ESCAPES = (
    (r"([\\`*])", r"\\\1"),
    (r"(?<![^\W_])_|_(?![^\W_])", r"\\_"),
    (r"~(?=~)", r"\\~"),
    (r"<(?=[A-Za-z/!?])", r"\\<"),
    (r"&(?=#?\w+;)", "&amp;"),
    (r"\](?=[(\[:])", r"\\]"),
    (r"^\[(?=[ xX]\])|\[(?=\^)", r"\\["),  # a check box, a footnote
    (r"^(#|>|[-+](?=\s)|[-=]{2,})", r"\\\1"),  # a heading, a quotation, an item of a list, a rule
    (r"^(\d+)([.)])(?=\s)", r"\1\\\2"),
    (r"(?<!\w)@(?=\w)", "<code>@</code>"),
    (r"#(?=\d)", "<code>#</code>"),
    (r"\b(GH|gh)-(?=\d)", r"\1<code>-</code>"),
    (r":(?=//)", "&#58;"),
    (r"\b(www)\.", r"\1&#46;"),
)


class Code(str):
    """Text for a code span."""

    __slots__ = ()


def prose(value: Any) -> str:
    """Plain text on one line; only what Markdown, HTML or GitHub would take for markup is escaped."""
    text = single_line(str(value))
    for pattern, replacement in ESCAPES:
        text = re.sub(pattern, replacement, text)
    return defused_markup(text)


def cell(value: Any) -> str:
    """Text for a table cell: one line, no pipe that would end the cell."""
    if not isinstance(value, Code):
        return prose(value).replace("|", "\\|")
    return html_code(value) if "\\|" in value else code(value).replace("|", "\\|")


def code(value: Any) -> str:
    """A code span, fenced with more backticks than the text holds in a row."""
    text = single_line(str(value))
    if not text:
        return ""
    if INLINE_COMMAND.search(text):
        return html_code(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def html_code(value: Any) -> str:
    """The same in HTML, every sign as a number: also where Markdown is not read, as in `<summary>`."""
    return f"<code>{numbered(single_line(str(value)))}</code>"


def block(text: str, language: str) -> str:
    """A fenced block; in HTML where a line of it would be taken for the end of the fence or a command."""
    if "```" in text or INLINE_COMMAND.search(text) or LINE_COMMAND.search(text):
        return f"<pre>{numbered(text)}</pre>".replace("\n\n", "\n&#10;")
    return f"```{language}\n{text}\n```"


def numbered(text: str) -> str:
    return re.sub(r"[^\w\s./-]|_", lambda found: f"&#{ord(found[0])};", text)


def shortened(value: Any, most: int) -> Any:
    """The first `most` characters, the type kept."""
    text = str(value)
    return (
        value if len(text) <= most else type(value)(f"{text[:most]}…") if isinstance(value, str) else f"{text[:most]}…"
    )
