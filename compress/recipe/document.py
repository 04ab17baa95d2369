"""A YAML 1.2 document as plain values, with the place of every value. Nothing about recipes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from compress.recipe.origin import Path, Place, Position, dotted

_MAX_VALUES = 10_000
"""More values than any recipe has: stops aliases that multiply."""

_PREFIX = "tag:yaml.org,2002:"
_CORE_SCHEMA = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]{1,400}|0o[0-7]{1,400}|0x[0-9a-fA-F]{1,400}"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}
_CONFLICT = re.compile(r"(?:<{7}|\|{7}|>{7})(?: .*)?|={7}")


class NotYamlError(Exception):
    """The text is no YAML document: nothing can be read from it."""

    def __init__(self, position: Position, message: str) -> None:
        super().__init__(message)
        self.position = position
        self.message = message


@dataclass(frozen=True)
class Document:
    """What was read, and where it stands.

    Attributes:
        value: dicts, lists and scalars; None for a document without a value.
        places: the place of every value, by its path.
        key_faults: position, dotted path and sentence of keys that are given twice or are no names. The first
            of two equal keys stands in `value`.
    """

    value: Any
    places: dict[Path, Place] = field(default_factory=dict)
    key_faults: list[tuple[Position, str, str]] = field(default_factory=list)


def scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar: `1e-4` is a float, `no` is text."""
    return _construct(_core_type(text), text)


def read_document(text: str) -> Document:
    """Parses `text`; anchors, aliases and merge keys are resolved.

    Raises:
        NotYamlError: a syntax error, an unresolved merge conflict, or more than one document.
    """
    _refuse_conflict_markers(text)
    try:
        root = _compose(text)
        return Document(None) if root is None else _Builder().build(root)
    except MarkedYAMLError as error:
        raise _syntax_fault(error, text) from error
    except ReaderError as error:
        message = f"the character {text[error.position]!r} is not allowed in YAML"
        raise NotYamlError(position_at(text, error.position), message) from error
    except YAMLError as error:
        raise NotYamlError(Position(1, 1), f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise NotYamlError(Position(1, 1), "lists or maps are nested too deeply") from error


class _CoreResolver(VersionedResolver):
    """YAML 1.2 core schema, whatever a %YAML directive says; ruamel's own also takes `1_000` and `0b1`."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0]:
            return Tag(suffix=_PREFIX + _core_type(value))
        return super().resolve(kind, value, (False, False))


def _core_type(text: str) -> str:
    return next((name for name, pattern in _CORE_SCHEMA.items() if pattern.fullmatch(text)), "str")


def _compose(text: str) -> Node | None:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreResolver
    yaml.composer.warn_double_anchors = False
    root: Node | None = yaml.compose(text)
    return root


def _construct(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Builder:
    """Turns a tree of nodes into a Document."""

    def __init__(self) -> None:
        self.places: dict[Path, Place] = {}
        self.key_faults: list[tuple[Position, str, str]] = []
        self.open: list[Node] = []
        self.seen = 0

    def build(self, root: Node) -> Document:
        value = self._value(root, (), None)
        return Document(value, self.places, self.key_faults)

    def _value(self, node: Node, path: Path, key: Position | None) -> Any:
        position = _start(node)
        if any(node is outer for outer in self.open):
            raise NotYamlError(position, f"the anchor `&{node.anchor}` contains itself")
        self._count(position)
        self.places[path] = Place(position, key)
        if isinstance(node, ScalarNode):
            return _scalar_value(node)
        if not str(node.tag).startswith(_PREFIX):
            raise NotYamlError(position, f"the tag `{node.tag}` is not known here: write the value without a tag")
        self.open.append(node)
        try:
            return self._map(node, path) if isinstance(node, MappingNode) else self._list(node, path)
        finally:
            self.open.pop()

    def _list(self, node: Node, path: Path) -> list[Any]:
        return [self._value(item, (*path, index), None) for index, item in enumerate(node.value)]

    def _map(self, node: Node, path: Path) -> dict[str, Any]:
        entries: dict[str, tuple[Node, Node]] = {}
        for key, value in self._own_entries(node, path):
            if key.value in entries:
                self._report_duplicate(entries[key.value][0], key, path)
            else:
                entries[key.value] = (key, value)
        for key, value in self._merged_entries(node):
            entries.setdefault(key.value, (key, value))
        return {name: self._value(value, (*path, name), _start(key)) for name, (key, value) in entries.items()}

    def _own_entries(self, node: Node, path: Path) -> Iterator[tuple[ScalarNode, Node]]:
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self.key_faults.append((_start(key), dotted(path), "a key must be a name, not a list or a map"))
            elif not _is_merge(key):
                _join_surrogates(key)
                yield key, value

    def _merged_entries(self, node: Node) -> Iterator[tuple[ScalarNode, Node]]:
        """Entries that `<<: *anchor` brings in, the nearest first."""
        for key, value in node.value:
            if not (isinstance(key, ScalarNode) and _is_merge(key)):
                continue
            for source in value.value if isinstance(value, SequenceNode) else [value]:
                if not isinstance(source, MappingNode):
                    raise NotYamlError(_start(source), "`<<` merges a map or a list of maps, such as `<<: *defaults`")
                if source is node or any(source is outer for outer in self.open):
                    raise NotYamlError(_start(key), "this map is merged into itself")
                self._count(_start(key))
                self.open.append(source)
                yield from self._own_entries(source, ())
                yield from self._merged_entries(source)
                self.open.pop()

    def _count(self, position: Position) -> None:
        self.seen += 1
        if self.seen > _MAX_VALUES:
            raise NotYamlError(position, f"more than {_MAX_VALUES} values: do aliases multiply?")

    def _report_duplicate(self, first: Node, second: ScalarNode, path: Path) -> None:
        message = f"the key `{second.value}` is given twice; line {_start(first).line} has it already"
        self.key_faults.append((_start(second), dotted((*path, second.value)), message))


def _is_merge(key: ScalarNode) -> bool:
    return key.value == "<<" and key.style is None


def _join_surrogates(node: ScalarNode) -> None:
    r"""Turns `"\ud83d\ude00"`, as JSON writes a character outside the first plane, into that character.

    Raises:
        NotYamlError: one half stands alone. That is no character and fits into no file name and no report.
    """
    try:
        node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        half = next(character for character in node.value if "\ud800" <= character <= "\udfff")
        message = f"`\\u{ord(half):04x}` stands alone: it is half of a character"
        raise NotYamlError(_start(node), message) from error


def _scalar_value(node: ScalarNode) -> Any:
    _join_surrogates(node)
    tag = str(node.tag)
    kind = tag.removeprefix(_PREFIX)
    if kind == tag or kind not in ("str", *_CORE_SCHEMA):
        raise NotYamlError(_start(node), f"the tag `{tag}` is not known here: write the value without a tag")
    if kind != "str" and not _CORE_SCHEMA[kind].fullmatch(node.value):
        raise NotYamlError(_start(node), f"`{node.value}` does not fit its tag `!!{kind}`")
    return _construct(kind, node.value)


def _start(node: Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def position_at(text: str, index: int) -> Position:
    """Line and column of the character at `index`."""
    before = text[:index]
    return Position(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


def _lines(text: str) -> list[str]:
    return re.split(r"\r\n|\r|\n", text)


def _refuse_conflict_markers(text: str) -> None:
    for number, line in enumerate(_lines(text), start=1):
        if _CONFLICT.fullmatch(line):
            message = f"`{line}` is a marker of a merge conflict: resolve the conflict and remove the marker"
            raise NotYamlError(Position(number, 1), message)


def _syntax_fault(error: MarkedYAMLError, text: str) -> NotYamlError:
    mark = error.problem_mark or error.context_mark
    lines = _lines(text)
    line = lines[mark.line] if mark.line < len(lines) else ""
    tab = line.find("\t")
    if tab >= 0 and ("\\t" in error.problem or not line[:tab].strip()):
        return NotYamlError(Position(mark.line + 1, tab + 1), "a tab character: YAML is indented with spaces only")
    began = error.context_mark
    if began and ("end of stream" in error.problem or "<stream end>" in error.problem):
        opening = lines[began.line][began.column : began.column + 1]
        return NotYamlError(Position(began.line + 1, began.column + 1), f"this `{opening}` is never closed")
    if began and "expected ':'" in error.problem:
        position = Position(began.line + 1, began.column + 1)
        return NotYamlError(position, "a key without its value: write a colon and a space after the key")
    sentence = _syntax_sentence(error, line[: mark.column], line[mark.column : mark.column + 1])
    return NotYamlError(Position(mark.line + 1, mark.column + 1), sentence)


def _syntax_sentence(error: MarkedYAMLError, before: str, character: str) -> str:
    """The parser's complaint in the user's words; `before` stands left of `character` on the line."""
    problem = error.problem
    if "another document" in problem:
        return "a second document starts here: a recipe is one document, without a further `---`"
    if "undefined alias" in problem:
        name = problem.split("'")[1]
        return f"the alias `*{name}` has no anchor `&{name}` before it"
    if "mapping values are not allowed" in problem:
        return "a `:` where no key can stand: check the indentation, or quote a value that contains `: `"
    if "<block end>" in problem and not before.strip():
        return "this does not go with the lines above it: check the indentation"
    if "<block end>" in problem:
        return "the value before this is already complete: put quotes around all of it, or start a new line"
    if "cannot start any token" in problem:
        return f"an unquoted value cannot start with `{character}`: put quotes around it"
    began = f" {error.context} that began in line {error.context_mark.line + 1}" if error.context_mark else ""
    return f"not valid YAML: {problem}{began}"
