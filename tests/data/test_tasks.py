from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.tasks import LONGEST_LINE, PACKAGED, TaskSet, read_task
from compress.errors import MissingResourceError, UsageError

CHOICE = {"question": "Which?", "choices": ["a", "b", "c"], "answer": 1}
TEXT = {"question": "How much is 6 x 7?", "answer": "42"}
LABEL = {"text": "Fine weather.", "label": "good"}


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass"))
    return path


def read(path: Path, *rows: Any, **options: Any) -> TaskSet:
    return read_task(str(write(path / "task.jsonl", *rows)), **options)


def fault(path: Path, *rows: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        read(path, *rows, **options)
    return str(caught.value)


def test_the_packaged_task_is_whole_and_attributed() -> None:
    task = read_task(None, name="next_sentence")
    assert (task.kind, task.chance, len(task.items), task.items_read) == (PACKAGED["next_sentence"], 0.25, 759, 759)
    from compress import data

    assert "next_sentence.jsonl" in (Path(data.__file__).parent / "default" / "ATTRIBUTION.md").read_text()


def test_an_unknown_packaged_task_names_those_there_are() -> None:
    for name in ("hellaswag", None):
        with pytest.raises(UsageError, match="next_sentence"):
            read_task(None, name=name)


def test_every_kind(tmp_path: Path) -> None:
    choices = read(tmp_path, CHOICE, CHOICE | {"choices": ["a", "b"], "cluster": "passage 1", "id": 7, "more": 1})
    assert (choices.name, choices.kind, choices.chance) == (
        "task",
        "multiple_choice",
        pytest.approx((1 / 3 + 1 / 2) / 2),
    )
    assert [item.id for item in choices.items] == ["1", "7"]
    assert [item.cluster for item in choices.items] == [None, "passage 1"]
    assert choices.items[0].expected == "b"
    texts = read(tmp_path, TEXT, TEXT | {"answer": ["42", "forty-two"]}, name="sums")
    assert (texts.name, texts.kind, texts.chance) == ("sums", "exact_match", None)
    assert texts.items[1].answer == ("42", "forty-two")
    assert read(tmp_path, TEXT, TEXT, kind="cloze").kind == "cloze"
    labels = read(tmp_path, LABEL, LABEL | {"label": 0, "text_pair": "Rain."})
    assert (labels.kind, labels.items[1].answer, labels.items[1].pair) == ("classification", 0, "Rain.")


def test_a_byte_order_mark_blank_lines_crlf_and_nul_are_data(tmp_path: Path) -> None:
    row = json.dumps(CHOICE | {"question": "a\u0000b \u001b[31m <script> | ::error::"})
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n\r\n  \n{row}".encode())
    task = read_task(str(tmp_path / "t.jsonl"))
    assert [item.id for item in task.items] == ["1", "4"]
    assert task.items[0].question.startswith("a\x00b")


BAD = {
    "missing answer": ({"question": "q", "choices": ["a", "b"]}, "no `answer`"),
    "null answer": (CHOICE | {"answer": None}, "no `answer`"),
    "answer out of range": (CHOICE | {"answer": 3}, "must be 0 to 2"),
    "negative answer": (CHOICE | {"answer": -1}, "must be 0 to 2"),
    "bool answer": (CHOICE | {"answer": True}, "must be an index"),
    "float answer": (CHOICE | {"answer": 1.0}, "must be an index"),
    "text answer": (CHOICE | {"answer": "b"}, "must be an index"),
    "no question": ({"choices": ["a", "b"], "answer": 0}, "no `question`"),
    "blank question": (CHOICE | {"question": " "}, "blank `question`"),
    "one choice": (CHOICE | {"choices": ["a"], "answer": 0}, "at least 2"),
    "choices are text": (CHOICE | {"choices": "abc"}, "must be a list"),
    "empty choice": (CHOICE | {"choices": ["a", ""]}, r"blank `choices\[1\]`"),
    "number as choice": (CHOICE | {"choices": ["a", 1]}, "must be a text"),
    "lone surrogate": ('{"question": "\\ud800", "choices": ["a", "b"], "answer": 0}', "no text"),
    "not JSON": ('{"question": ', "not valid JSON"),
    "not UTF-8": (json.dumps(CHOICE).replace("Which", "\udcff"), "not UTF-8"),
    "a list": ("[1]", "not an object"),
    "deep": ("[" * 100_000 + "]" * 100_000, "nested too deeply|not valid JSON"),
    "10 MB": (CHOICE | {"question": "x" * 10_485_760}, f"{LONGEST_LINE:,}"),
    "another kind": (LABEL, "one file holds one kind"),
    "bool id": (CHOICE | {"id": False}, "`id`"),
    "list as cluster": (CHOICE | {"cluster": ["a"]}, "`cluster`"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_its_file_and_line(name: str, tmp_path: Path) -> None:
    row, rule = BAD[name]
    message = fault(tmp_path, CHOICE, CHOICE, row)
    assert f"{tmp_path / 'task.jsonl'}: line 3 " in message
    assert re.search(rule, message)
    assert len(message) < 600


def test_all_faults_are_listed_up_to_a_handful(tmp_path: Path) -> None:
    message = fault(tmp_path, CHOICE, *[CHOICE | {"answer": 9}] * 12)
    assert message.count("line ") == 5
    assert "and 7 more" in message


@pytest.mark.parametrize(
    ("rows", "told"),
    [((), "no items"), (("", " "), "no items"), ((CHOICE,), "one item")],
    ids=["empty", "blank", "one"],
)
def test_too_few_rows_for_a_comparison(rows: tuple[Any, ...], told: str, tmp_path: Path) -> None:
    assert f"holds {told}" in fault(tmp_path, *rows)
    assert "at least 2" in fault(tmp_path, CHOICE, CHOICE, items=1)


def test_ids_are_unique_and_lines_count_as_ids(tmp_path: Path) -> None:
    assert 'the id "x" of line 1' in fault(tmp_path, CHOICE | {"id": "x"}, CHOICE | {"id": "x"})
    assert 'the id "2" of line 1' in fault(tmp_path, CHOICE | {"id": 2}, CHOICE)
    assert len(read(tmp_path, CHOICE, CHOICE).items) == 2, "the same question twice is data"


def test_a_choice_may_be_there_twice(tmp_path: Path) -> None:
    """Published sets have such rows (MMLU even the right one), and lm-eval scores them by the index."""
    assert len(read(tmp_path, CHOICE | {"choices": ["a", "b", "a"]}, CHOICE | {"choices": ["a", "b", "b"]}).items) == 2


@pytest.mark.parametrize("kind", ["multiple_choice", "classification", "cloze"])
def test_a_kind_that_is_asked_for_binds_the_rows(kind: str, tmp_path: Path) -> None:
    other = LABEL if kind == "multiple_choice" else CHOICE
    assert "one file holds one kind" in fault(tmp_path, other, other, kind=kind)


def test_places_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(MissingResourceError, match="does not exist"):
        read_task(str(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="not a file"):
        read_task(str(tmp_path))
    for odd in ("a\0b.jsonl", "~nobody-here/x.jsonl", "x" * 5000 + ".jsonl"):
        with pytest.raises(MissingResourceError):
            read_task(odd)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(alphabet="abc", min_size=1), min_size=3, max_size=40), st.integers(2, 40), st.randoms())
def test_a_sample_depends_on_content_alone(tmp_path_factory: Any, texts: list[str], count: int, random: Any) -> None:
    folder = tmp_path_factory.mktemp("t")
    rows = [CHOICE | {"question": text, "id": f"i{index}"} for index, text in enumerate(texts)]
    chosen = read(folder, *rows, items=count)
    assert len(chosen.items) == min(count, len(rows))
    assert chosen.items_read == len(rows)
    order = [int(item.id[1:]) for item in chosen.items]
    assert order == sorted(order), "in the order of the file"
    mixed = list(rows)
    random.shuffle(mixed)
    assert sorted(item.question for item in read(folder, *mixed, items=count).items) == sorted(
        item.question for item in chosen.items
    )
    smaller = read(folder, *rows, items=2)
    assert {item.content_sha256 for item in smaller.items} <= {item.content_sha256 for item in chosen.items}


def test_the_hash_follows_the_items(tmp_path: Path) -> None:
    one, other = read(tmp_path, CHOICE, CHOICE), read(tmp_path, CHOICE, CHOICE | {"answer": 0})
    assert one.sha256 != other.sha256
    assert one.sha256 == read(tmp_path, CHOICE | {"id": "named"}, CHOICE).sha256


def test_starts_without_torch() -> None:
    code = "import sys, compress.data.tasks; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
