from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pyarrow
import pytest
from hub_stand_in import Hub, serve
from pyarrow import parquet
from tiny import sentences, write_text

from compress.data.text import Corpus, check_disjoint, read_corpus
from compress.errors import EXIT_MISSING_RESOURCE, EXIT_USAGE, MissingResourceError, UsageError


def read(path: Path, **options: Any) -> Corpus:
    return read_corpus(str(path), part="calibration", **options)


def chat(messages: list[dict[str, Any]]) -> str:
    template = (
        "{% for m in messages %}{% if m.role == 'alien' %}{{ fail('no aliens') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    return jinja2.Environment().from_string(template, globals={"fail": fail}).render(messages=messages)


def test_default_text_has_two_separate_parts() -> None:
    calibration = read_corpus("default", part="calibration")
    evaluation = read_corpus("default", part="evaluation")
    assert (calibration.lines_read, calibration.lines_empty) == (8026, 0)
    assert (evaluation.lines_read, evaluation.lines_empty) == (1004, 0)
    check_disjoint(calibration, evaluation)


def test_jsonl_counts_and_hashes_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": " one "}\r\n\n{"text": "z\\u00fcrich\\ntwo"}\n{"text": "  "}\n', encoding="utf-8")
    corpus = read(path)
    assert corpus.source == str(path)
    assert corpus.texts == (" one ", "zürich\ntwo")
    assert (corpus.lines_read, corpus.lines_empty) == (4, 2)
    expected = [hashlib.sha256(text.encode()).hexdigest() for text in ("one", "zürich\ntwo")]
    assert corpus.line_hashes == set(expected)
    assert corpus.sha256 == hashlib.sha256("".join(expected).encode()).hexdigest()


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("one\ntwo\n\nthree\n", ("one\ntwo", "three")),
        ("\n\none\n \n\t\ntwo", ("one", "two")),
        ("one\r\ntwo\r\n", ("one", "two")),
        ("one\ntwo\n\n\n", ("one", "two")),
        ("\ufeffone", ("one",)),
    ],
)
def test_txt_is_divided_at_blank_lines_or_else_at_every_line(
    tmp_path: Path, content: str, texts: Sequence[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content.encode())
    corpus = read(path)
    assert corpus.texts == texts
    assert corpus.lines_read == len(texts)


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path.write_text(json.dumps({"messages": messages, "id": 1}))
    assert read(path, chat_template=chat).texts == ("<user>hi<assistant>hello",)
    with pytest.raises(UsageError, match=r"line 1 holds a chat .* no chat template"):
        read(path)
    path.write_text(json.dumps({"messages": [{"role": "alien", "content": "hi"}]}))
    with pytest.raises(UsageError, match="line 1 is refused by the model's chat template: no aliens"):
        read(path, chat_template=chat)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "text.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["one", None, "two"]}), path)
    corpus = read(path)
    assert corpus.texts == ("one", "two")
    assert (corpus.lines_read, corpus.lines_empty) == (3, 1)
    chats = [[{"role": "user", "content": "hi"}]]
    parquet.write_table(pyarrow.table({"messages": chats}), path)
    assert read(path, chat_template=chat).texts == ("<user>hi",)
    parquet.write_table(pyarrow.table({"id": [1], "content": ["one"]}), path)
    with pytest.raises(UsageError, match=r"no column `text` or `messages`; it has id, content"):
        read(path)
    parquet.write_table(pyarrow.table({"text": [1]}), path)
    with pytest.raises(UsageError, match=r"row 1, column text, has neither .*`text` is int"):
        read(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="cannot be read as parquet"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"", "holds nothing"),
        ("x.txt", b"", "holds nothing"),
        ("x.jsonl", b"\n  \n\n", "holds 3 blank lines and no text"),
        ("x.txt", b"\n  \n\n", "holds 3 blank lines and no text"),
        ("x.jsonl", b'{"text": "a"}\n{"content": "b", "n": 1}\n', r"line 2 has neither .*it has `content`, `n`"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3 is not valid JSON"),
        ("x.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "line 2 is not valid JSON: nested too deeply"),
        ("x.jsonl", b'"text"\n', "line 1 is str, not an object"),
        ("x.jsonl", b"{}\n", "it has no keys"),
        ("x.jsonl", b'{"text": 3}\n', r"`text` is int"),
        ("x.jsonl", b'{"messages": "hi"}\n', "line 1 has neither"),
        ("x.jsonl", b'{"messages": ["hi"]}\n', "line 1 has neither"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', "line 1 holds a character that is no text"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "not UTF-8: line 2 has the byte 0xe9"),
        ("x.txt", b"\xff\xfea\0", "not UTF-8: line 1 has the byte 0xff"),
        ("x.csv", b"text\n", "unknown kind"),
    ],
)
def test_h09_unusable_files_are_refused_with_the_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read(path)
    assert str(path) in caught.value.message


def test_faults_are_listed_together_but_not_endlessly(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"content": 1}\n' * 30)
    with pytest.raises(UsageError) as caught:
        read(path)
    lines = caught.value.message.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "and 25 more like these"


def test_missing_files_and_things_that_are_no_files(tmp_path: Path) -> None:
    for source in (tmp_path / "absent.jsonl", tmp_path / "absent", Path("absent.txt")):
        with pytest.raises(MissingResourceError, match="does not exist"):
            read(source)
    with pytest.raises(UsageError, match="is not a file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="is not a file"):
        read(tmp_path / "pipe.jsonl")
    for name in ("~nobody-of-this-name/x.jsonl", "x" * 300 + ".txt", "./" + "x" * 300):
        with pytest.raises(MissingResourceError, match="cannot be read"):
            read_corpus(name, part="calibration")
    with pytest.raises(MissingResourceError, match="does not exist"):
        read_corpus("x\0y.jsonl", part="calibration")
    with pytest.raises(UsageError, match="neither a file nor the name of a data set"):
        read_corpus("a/" * 300 + "b", part="calibration")
    with pytest.raises(UsageError, match="neither a file nor the name of a data set"):
        read_corpus("a//b", part="calibration")


def test_shared_lines_are_refused(tmp_path: Path) -> None:
    calibration = read(write_text(tmp_path / "calibration.jsonl", seed=0))
    evaluation = read(write_text(tmp_path / "evaluation.jsonl", seed=1))
    check_disjoint(calibration, evaluation)
    mixed = tmp_path / "mixed.txt"
    shared = sentences(seed=0)[7]
    mixed.write_text("\n".join([*sentences(seed=1), f"  {shared} ", sentences(seed=0)[9]]))
    with pytest.raises(UsageError, match="2 lines are both in the calibration text") as caught:
        check_disjoint(calibration, read(mixed))
    assert calibration.source in caught.value.message
    assert str(mixed) in caught.value.message
    assert shared[:60] in caught.value.message
    assert shared not in caught.value.message
    assert len(shared) > 80


ASK = """
import json, sys
from compress.errors import CompressError
from compress.data.text import read_corpus
for source in sys.argv[1:]:
    try:
        print(json.dumps(read_corpus(source, part="evaluation").texts))
    except CompressError as error:
        print(json.dumps([error.exit_code, error.message, error.hint]))
"""


def ask(sources: list[str], home: Path, endpoint: str, **env: str) -> list[Any]:
    """Reads data sets in a fresh process, because the hub's libraries read their settings when imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **env}
    result = subprocess.run([sys.executable, "-c", ASK, *sources], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_data_sets_of_the_hub(tmp_path: Path) -> None:
    folder, home = tmp_path / "texts", tmp_path / "home"
    for split in ("train", "test"):
        write_text(folder / f"{split}.jsonl", count=2, seed=len(split))
    sources = ["org/texts", "org/texts:train", "org/texts#body", "org/texts:nine", "org/texts/nine", "org/absent"]
    with serve(Hub({"org/texts": {"main": folder}})) as hub:
        test, train, column, split, config, absent = ask(sources, home, hub.endpoint)
    assert test == sentences(2, seed=4)
    assert train == sentences(2, seed=5)
    assert column[:2] == [EXIT_USAGE, "org/texts#body has no column body; it has text"]
    assert split[0] == config[0] == EXIT_USAGE
    assert "nine" in split[1]
    assert "nine" in config[1]
    assert absent[0] == EXIT_MISSING_RESOURCE
    assert "org/absent" in absent[1]


def test_data_sets_without_a_connection(tmp_path: Path) -> None:
    [(code, message, hint)] = ask(["org/other"], tmp_path, "http://127.0.0.1:1", HF_HUB_OFFLINE="1")
    assert (code, "cannot be fetched" in message) == (EXIT_MISSING_RESOURCE, True)
    assert "`default`" in hint


def test_reading_a_file_needs_no_torch(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text.jsonl", count=2)
    code = (
        "import sys; from compress.data.text import read_corpus; read_corpus(sys.argv[1], part='calibration'); "
        "assert not {'torch', 'transformers', 'numpy', 'datasets', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
