"""Where calibration and evaluation text comes from: the package, a file, or a data set of the hub.

A *line* is one text of a source: a line of a .jsonl file, a row of a table, a paragraph of a .txt file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from compress.errors import MissingResourceError, UsageError

Part = Literal["calibration", "evaluation"]
ChatTemplate = Callable[[list[dict[str, Any]]], str]

DEFAULT = "default"
FILE_SUFFIXES = (".txt", ".jsonl", ".parquet")
_DEFAULT_SPLIT: Mapping[Part, str] = {"calibration": "train", "evaluation": "test"}
_KEYS = "a string under `text` or a chat under `messages`"
_LISTED = 5

_DATA_SET = re.compile(r"(?P<name>[^/:#@]+(/[^/:#@]+)?)(/(?P<config>[^/:#@]+))?(:(?P<split>[^:#]+))?(#(?P<column>.+))?")


@dataclass(frozen=True)
class Corpus:
    """The texts of one source.

    Attributes:
        source: as the user wrote it.
        texts: the lines that are not blank, in order, as they are.
        lines_read, lines_empty: all lines, and those that were blank.
        line_hashes: SHA-256 of each text without the white space around it.
        sha256: over the hashes of all texts in order.
    """

    source: str
    texts: tuple[str, ...]
    lines_read: int
    lines_empty: int
    line_hashes: frozenset[str]
    sha256: str


def read_corpus(source: str, *, part: Part, chat_template: ChatTemplate | None = None) -> Corpus:
    """Reads `default`, a .txt, .jsonl or .parquet file, or a data set `NAME[/CONFIG][:SPLIT][#COLUMN]`.

    A .txt file is divided at its blank lines; one that has none gives a text per line. A line of a .jsonl file or a
    row of a table has the string `text`, or `messages`, which `chat_template` turns into text.

    Args:
        part: which part of the default text, and the split of a data set if none is named (train or test).

    Raises:
        MissingResourceError: no such file or data set, or no connection to fetch it.
        UsageError: unreadable, not UTF-8, malformed (with the lines), or without any text.
    """
    if source == DEFAULT:
        default = resources.files("compress.data").joinpath("default", f"{part}.jsonl").read_bytes()
        return _corpus(source, _jsonl_texts(source, default, chat_template))
    if _is_file(source):
        return _corpus(source, _file_texts(source, chat_template))
    return _corpus(source, _data_set_texts(source, part, chat_template))


def check_disjoint(calibration: Corpus, evaluation: Corpus) -> None:
    """Raises UsageError if any text is in both: what a model was fitted to says nothing about how good it is."""
    shared = calibration.line_hashes & evaluation.line_hashes
    if not shared:
        return
    first = next(text for text in evaluation.texts if _hash(text) in shared)
    count = "1 line is" if len(shared) == 1 else f"{len(shared)} lines are"
    raise UsageError(
        f"{count} both in the calibration text ({calibration.source}) and in the evaluation text "
        f"({evaluation.source}); the first: {_shortened(first)}",
        hint="take the shared lines out of one of them, or name another source (`default` has two separate parts)",
    )


def _corpus(source: str, lines: Iterable[str]) -> Corpus:
    read = list(lines)
    texts = tuple(line for line in read if line.strip())
    if not texts:
        found = f"{len(read)} blank lines and no text" if read else "nothing"
        raise UsageError(f"{source} holds {found}", hint=f"a line of text is needed, in .jsonl {_KEYS}")
    hashes = [_hash(text) for text in texts]
    return Corpus(
        source=source,
        texts=texts,
        lines_read=len(read),
        lines_empty=len(read) - len(texts),
        line_hashes=frozenset(hashes),
        sha256=hashlib.sha256("".join(hashes).encode()).hexdigest(),
    )


def _is_file(source: str) -> bool:
    return (
        _exists(source)
        or source.lower().endswith(FILE_SUFFIXES)
        or source.startswith((".", "/", "~"))
        or "\\" in source
    )


def _exists(source: str) -> bool:
    try:
        return Path(source).expanduser().exists()
    except (OSError, RuntimeError):  # too long for a file name, no permission, or `~somebody` who is not here
        return False


def _file_texts(source: str, chat_template: ChatTemplate | None) -> list[str]:
    try:
        path = Path(source).expanduser()
        exists, suffix = path.exists(), path.suffix.lower()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MissingResourceError(f"{source} cannot be read: {reason}", hint="check the path") from error
    if not exists:
        raise MissingResourceError(f"{source} does not exist", hint="check the path")
    if not path.is_file():
        raise UsageError(f"{source} is not a file", hint=f"pass a file: {', '.join(FILE_SUFFIXES)}")
    if suffix not in FILE_SUFFIXES:
        raise UsageError(f"{source} is of an unknown kind", hint=f"known are {', '.join(FILE_SUFFIXES)}")
    if suffix == ".parquet":
        return _parquet_texts(path, source, chat_template)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    return _txt_texts(source, content) if suffix == ".txt" else _jsonl_texts(source, content, chat_template)


def _decode(source: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{source} is not UTF-8: line {line} has the byte 0x{content[error.start]:02x}",
            hint="convert it to UTF-8 (iconv)",
        ) from error


def _txt_texts(source: str, content: bytes) -> list[str]:
    lines = _decode(source, content).replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    if not any(line.strip() for line in lines):
        return lines
    while not lines[-1].strip():
        lines.pop()
    if all(line.strip() for line in lines):
        return lines
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return ["\n".join(paragraph) for paragraph in paragraphs]


def _jsonl_texts(source: str, content: bytes, chat_template: ChatTemplate | None) -> list[str]:
    """One text per line; a blank line is a blank text. All faults are raised together."""
    lines = _decode(source, content).split("\n")
    if not lines[-1]:
        lines.pop()

    def rows() -> Iterator[tuple[str, Any]]:
        for number, line in enumerate(lines, start=1):
            yield f"line {number}", _parse_line(line)

    return _row_texts(source, rows(), chat_template)


def _parse_line(line: str) -> Any:
    """The row, {"text": ""} for a blank line, or the ValueError for a malformed one."""
    if not line.strip():
        return {"text": ""}
    try:
        return json.loads(line)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("nested too deeply")


def _row_texts(source: str, rows: Iterable[tuple[str, Any]], chat_template: ChatTemplate | None) -> list[str]:
    texts, faults = [], []
    for place, row in rows:
        try:
            texts.append(_row_text(row, chat_template))
        except ValueError as error:
            faults.append(f"{place} {error}")
    if faults:
        shown = "\n".join(f"{source}: {fault}" for fault in faults[:_LISTED])
        more = f"\nand {len(faults) - _LISTED} more like these" if len(faults) > _LISTED else ""
        raise UsageError(shown + more, hint=f"a line of a .jsonl file has {_KEYS}")
    return texts


def _row_text(row: Any, chat_template: ChatTemplate | None) -> str:
    if isinstance(row, ValueError):
        raise ValueError(f"is not valid JSON: {row}")
    if not isinstance(row, Mapping):
        raise ValueError(f"is {type(row).__name__}, not an object with {_KEYS}")
    messages = row.get("messages")
    if isinstance(row.get("text"), str):
        return _encodable(row["text"])
    if "text" not in row and isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        return _encodable(_chat_text(messages, chat_template))
    keys = ", ".join(f"`{key}`" for key in row) or "no keys"
    kind = f" (`text` is {type(row['text']).__name__})" if "text" in row else ""
    raise ValueError(f"has neither {_KEYS}; it has {keys}{kind}")


def _chat_text(messages: list[dict[str, Any]], chat_template: ChatTemplate | None) -> str:
    from jinja2 import TemplateError

    if chat_template is None:
        raise ValueError("holds a chat under `messages`, and the model has no chat template to write it with")
    try:
        return chat_template(messages)
    except TemplateError as error:  # templates refuse, say, two turns of the same role in a row
        raise ValueError(f"is refused by the model's chat template: {error}") from error


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"holds a character that is no text: {text[error.start]!r}") from error
    return text


def _parquet_texts(path: Path, source: str, chat_template: ChatTemplate | None) -> list[str]:
    from pyarrow import ArrowException, parquet

    try:
        names = parquet.read_schema(path).names
        column = _choose_column(source, names, None)
        values = parquet.read_table(path, columns=[column]).column(column).to_pylist()
    except (ArrowException, OSError) as error:
        raise UsageError(f"{source} cannot be read as parquet: {error}") from error
    return _column_texts(source, column, values, chat_template)


def _choose_column(source: str, names: Sequence[str], asked: str | None) -> str:
    for column in [asked] if asked else ["text", "messages"]:
        if column in names:
            return column
    raise UsageError(
        f"{source} has no column {asked or '`text` or `messages`'}; it has {', '.join(names) or 'none'}",
        hint="of a data set of the hub, name the column: NAME[/CONFIG][:SPLIT]#COLUMN",
    )


def _column_texts(source: str, column: str, values: Iterable[Any], chat_template: ChatTemplate | None) -> list[str]:
    """A column of strings, or of chats. Null is a blank text."""

    def rows() -> Iterator[tuple[str, Any]]:
        for number, value in enumerate(values, start=1):
            key = "messages" if isinstance(value, list) else "text"
            yield f"row {number}, column {column},", {key: "" if value is None else value}

    return _row_texts(source, rows(), chat_template)


def _data_set_texts(source: str, part: Part, chat_template: ChatTemplate | None) -> list[str]:
    match = _DATA_SET.fullmatch(source)
    if match is None:
        raise UsageError(
            f"{source} is neither a file nor the name of a data set",
            hint=f"write {', '.join(FILE_SUFFIXES)} files, NAME[/CONFIG][:SPLIT][#COLUMN], or {DEFAULT}",
        )
    data_set = _load_data_set(source, match["name"], match["config"], match["split"] or _DEFAULT_SPLIT[part])
    column = _choose_column(source, data_set.column_names, match["column"])
    return _column_texts(source, column, data_set[column], chat_template)


def _load_data_set(source: str, name: str, config: str | None, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except (ValueError, TypeError, RuntimeError) as error:  # unknown configuration or split, a loading script
        raise UsageError(
            f"{source}: {_first_line(error)}", hint="write NAME[/CONFIG][:SPLIT][#COLUMN], NAME being org/name"
        ) from error
    except OSError as error:  # also not found, gated, and no connection
        raise MissingResourceError(
            f"the data set {source} cannot be fetched ({_first_line(error)})",
            hint="check the spelling and the connection; without one, pass a file, or `default`",
        ) from error


def _hash(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()


def _shortened(text: str) -> str:
    words = " ".join(text.split())
    return repr(words if len(words) <= 80 else words[:77] + "...")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
