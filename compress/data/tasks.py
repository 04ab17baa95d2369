"""Task items with a right answer: from a .jsonl file, or from the package. One object per line:

    multiple_choice   {"question": ..., "choices": [...], "answer": index}
    cloze             {"question": ..., "answer": "words"}            right if greedy decoding goes on with the answer
    exact_match       {"question": ..., "answer": "text" or [texts]}  right if the generated text is one of them
    classification    {"text": ..., "label": index or name}           optional "text_pair"; for encoders

Optional everywhere: "id", else the number of the line, and "cluster": what items have in common (a passage), so that
they do not count as independent. Other keys are ignored. Without torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from compress.errors import MissingResourceError, UsageError

TaskKind = Literal["multiple_choice", "cloze", "exact_match", "classification"]

KINDS: tuple[TaskKind, ...] = ("multiple_choice", "cloze", "exact_match", "classification")
PACKAGED: Mapping[str, TaskKind] = {"next_sentence": "multiple_choice"}
"""Tasks inside the package: the true second sentence of a Wikipedia article among four of the same topic."""
LONGEST_LINE = 1_000_000
"""Bytes of one line. No model has positions for more, and a line without an end must not fill the memory."""
FEWEST_ITEMS = 2
_LISTED = 5
_FORMS = (
    'a line is {"question", "choices", "answer": index}, {"question", "answer": text} or {"text", "label"}; '
    "`kind` of the task says which where the keys do not"
)


@dataclass(frozen=True)
class TaskItem:
    """One question.

    Attributes:
        id: unique in its task: the row's `id`, else the number of its line.
        answer: index of the right choice; text that is to follow; texts of which one is to be generated; index or name
            of the label.
        pair: second text of a classification.
        cluster: name of what it has in common with others; None if it stands alone.
    """

    id: str
    question: str
    answer: int | str | tuple[str, ...]
    choices: tuple[str, ...] = ()
    pair: str | None = None
    cluster: str | None = None

    @property
    def expected(self) -> str:
        """The right answer as text."""
        if isinstance(self.answer, int):
            return self.choices[self.answer] if self.choices else str(self.answer)
        return self.answer if isinstance(self.answer, str) else " | ".join(self.answer)

    @property
    def content_sha256(self) -> str:
        """Over all that is asked and expected; not over the id, which may only count lines."""
        content = [self.question, self.pair, list(self.choices), self.answer, self.cluster]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True)
class TaskSet:
    """The items of one task.

    Attributes:
        source: as the user wrote it; the name of a task of the package.
        chance: accuracy of guessing, 0..1: the mean of 1 / choices. None for kinds without choices.
        sha256: over the content of all items in order.
        items_read: rows of the file, of which `items` may be a part.
    """

    name: str
    source: str
    kind: TaskKind
    items: tuple[TaskItem, ...]
    chance: float | None
    sha256: str
    items_read: int


def read_task(
    source: str | None, *, name: str | None = None, kind: TaskKind | None = None, items: int | None = None
) -> TaskSet:
    """Reads a .jsonl file, or with `source` None the task of the package that is called `name`.

    Args:
        name: what gates and reports call it; None takes the file's name without its ending.
        kind: needed for a cloze, whose rows look like those of exact_match; else the keys of the first row tell it.
        items: at most so many: those whose content has the smallest SHA-256, in the order of the file. That is a fixed
            sample that does not depend on where in the file an item stands.

    Raises:
        MissingResourceError: no such file.
        UsageError: no such task in the package, or rows at fault, with file and line of each.
    """
    if source is None:
        content, source, name = _packaged(name)
    else:
        content = _content(source)
        name = name or Path(source).stem
    rows, faults = _rows(content)
    kind = kind or next((found for row in rows.values() if (found := _kind_of(row))), None)
    read: dict[int, TaskItem] = {}
    for number, row in rows.items():
        try:
            read[number] = _item(row, number, kind)
        except ValueError as error:
            faults[number] = str(error)
    faults |= _repeated_ids(read)
    _raise_faults(source, faults)
    if len(read) < FEWEST_ITEMS or kind is None:
        raise UsageError(
            f"{source} holds {_count(len(read))}; a comparison of two models needs at least {FEWEST_ITEMS}",
            hint=_FORMS,
        )
    chosen = _sample(tuple(read.values()), items)
    return TaskSet(
        name=name,
        source=source,
        kind=kind,
        items=chosen,
        chance=sum(1 / len(item.choices) for item in chosen) / len(chosen) if kind == "multiple_choice" else None,
        sha256=hashlib.sha256("".join(item.content_sha256 for item in chosen).encode()).hexdigest(),
        items_read=len(read),
    )


def _packaged(name: str | None) -> tuple[bytes, str, str]:
    if name is None or name not in PACKAGED:
        raise UsageError(
            f"there is no task {name!r} in the package; it has {', '.join(PACKAGED)}",
            hint="give the task a `source`: a .jsonl file",
        )
    return resources.files("compress.data").joinpath("default", f"{name}.jsonl").read_bytes(), name, name


def _content(source: str) -> bytes:
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return path.read_bytes()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no permission, too long a name, `~somebody`, a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise MissingResourceError(f"the task file {source} cannot be read: {reason}") from error
    if exists:
        raise UsageError(f"the task file {source} is not a file", hint="pass a .jsonl file")
    raise MissingResourceError(f"the task file {source} does not exist", hint="check the path")


def _rows(content: bytes) -> tuple[dict[int, Mapping[str, Any]], dict[int, str]]:
    """Rows by the number of their line, and what is wrong with the others. Blank lines are passed over."""
    rows: dict[int, Mapping[str, Any]] = {}
    faults: dict[int, str] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows[number] = _row(line)
        except ValueError as error:
            faults[number] = str(error)
    return rows, faults


def _row(line: bytes) -> Mapping[str, Any]:
    if len(line) > LONGEST_LINE:
        raise ValueError(f"has {len(line):,} bytes; a row has at most {LONGEST_LINE:,}")
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: it has the byte 0x{line[error.start]:02x}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"is {_shown(row)}, not an object")
    return row


def _kind_of(row: Mapping[str, Any]) -> TaskKind | None:
    """The kind that the keys of a row tell; None where they tell none."""
    if "choices" in row:
        return "multiple_choice"
    if "label" in row:
        return "classification"
    return "exact_match" if isinstance(row.get("answer"), str | list) else None


def _item(row: Mapping[str, Any], number: int, kind: TaskKind | None) -> TaskItem:
    """The row as an item; ValueError with the rest of a sentence that starts with the line's place."""
    own = _kind_of(row)
    alike: set[TaskKind | None] = {"cloze", "exact_match"}
    if own and own != kind and {own, kind} != alike:
        raise ValueError(f"has the keys of {own}, but the task is {kind}: one file holds one kind")
    asked = "text" if kind == "classification" else "question"
    question = _text(_value(row, asked), asked)
    choices = _choices(row) if kind == "multiple_choice" else ()
    return TaskItem(
        id=_name(row, "id") or str(number),
        question=question,
        answer=_answer(row, kind, choices),
        choices=choices,
        pair=_text(row["text_pair"], "text_pair") if kind == "classification" and "text_pair" in row else None,
        cluster=_name(row, "cluster"),
    )


def _choices(row: Mapping[str, Any]) -> tuple[str, ...]:
    found = _value(row, "choices")
    if not isinstance(found, list):
        raise ValueError(f"has {_shown(found)} as `choices`; it must be a list of texts")
    if len(found) < 2:
        raise ValueError(f"has {len(found)} `choices`; there must be at least 2")
    return tuple(_text(choice, f"choices[{index}]") for index, choice in enumerate(found))


def _answer(row: Mapping[str, Any], kind: TaskKind | None, choices: Sequence[str]) -> int | str | tuple[str, ...]:
    if kind == "classification":
        label = _value(row, "label")
        if isinstance(label, str):
            return _text(label, "label")
        return _index(label, "label", None)
    answer = _value(row, "answer")
    if kind == "multiple_choice":
        return _index(answer, "answer", len(choices))
    if kind == "exact_match" and isinstance(answer, list):
        if not answer:
            raise ValueError("has an empty list as `answer`")
        return tuple(_text(one, f"answer[{index}]") for index, one in enumerate(answer))
    return _text(answer, "answer")


def _index(value: Any, key: str, count: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"has {_shown(value)} as `{key}`; it must be an index, counted from 0")
    if value < 0 or (count is not None and value >= count):
        allowed = "0 or more" if count is None else f"0 to {count - 1}"
        raise ValueError(f"has {_shown(value)} as `{key}`; it must be {allowed}")
    return value


def _value(row: Mapping[str, Any], key: str) -> Any:
    if row.get(key) is None:
        keys = ", ".join(_shown(name) for name in row) or "none"
        raise ValueError(f"has no `{key}`; its keys: {keys}")
    return row[key]


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has {_shown(value)} as `{key}`; it must be a text")
    if not value.strip():
        raise ValueError(f"has a blank `{key}`")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"has a character in `{key}` that is no text: {value[error.start]!r}") from error
    return value


def _name(row: Mapping[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"has {_shown(value)} as `{key}`; it must be a text or a whole number")
    return _text(str(value), key)


def _repeated_ids(items: Mapping[int, TaskItem]) -> dict[int, str]:
    first: dict[str, int] = {}
    faults = {}
    for number, item in items.items():
        before = first.setdefault(item.id, number)
        if before != number:
            faults[number] = f"has the id {_shown(item.id)} of line {before}"
    return faults


def _raise_faults(source: str, faults: Mapping[int, str]) -> None:
    if not faults:
        return
    listed = "\n".join(f"{source}: line {number} {faults[number]}" for number in sorted(faults)[:_LISTED])
    more = f"\nand {len(faults) - _LISTED} more lines at fault" if len(faults) > _LISTED else ""
    raise UsageError(listed + more, hint=f"correct these lines or take them out; {_FORMS}")


def _sample(items: tuple[TaskItem, ...], count: int | None) -> tuple[TaskItem, ...]:
    if count is None or count >= len(items):
        return items
    if count < FEWEST_ITEMS:
        raise UsageError(f"{count} items were asked for; a comparison of two models needs at least {FEWEST_ITEMS}")
    ranked = sorted(range(len(items)), key=lambda index: items[index].content_sha256)  # stable: ties by their place
    return tuple(items[index] for index in sorted(ranked[:count]))


def _count(number: int) -> str:
    return {0: "no items", 1: "one item"}.get(number, f"{number} items")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)  # ASCII: control characters and surrogates are escaped
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
