from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval_files import CHOICES, rows, write

from compress.errors import MissingResourceError, UsageError
from compress.measure.tasks.lm_eval_check import check_lm_eval


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def refused(*files: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        check_lm_eval([str(file) for file in files], **options)
    return f"{caught.value}\n{caught.value.hint}"


def text(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def test_a_local_task_is_loaded_with_its_data(tmp_path: Path) -> None:
    file = write(tmp_path, "mine", rows(3), **CHOICES)
    checked = check_lm_eval([str(file)])
    assert [task.task_name for task in checked.tasks[str(file)]] == ["mine"]
    assert not checked.trusted


def test_several_tasks_of_a_group(tmp_path: Path) -> None:
    """Inline members; a group asks for lm-eval's own index, as its members may stand in it."""
    write(tmp_path, "one", rows(2), **CHOICES)
    data = f"dataset_path: json\n    dataset_kwargs: {{data_files: {{test: {tmp_path / 'one.jsonl'}}}}}\n"
    asks = "    doc_to_text: '{{question}}'\n    doc_to_choice: '{{choices}}'\n    doc_to_target: '{{answer}}'\n"
    member = f"    {data}    test_split: test\n    output_type: multiple_choice\n{asks}"
    file = text(tmp_path / "both.yaml", f"group: both\ntask:\n  - task: a\n{member}  - task: b\n{member}")
    found = check_lm_eval([str(file)]).tasks[str(file)]
    assert [task.task_name for task in found] == ["both::a", "both::b"]


CODE = {
    "function": ("task: x\ndataset_path: json\nprocess_docs: !function utils.clean\n", ":3: !function utils.clean"),
    "inside a list": ("task: x\nmetric_list:\n  - metric: !function m.f\n", ":3: !function m.f"),
    "another handle": ("%TAG !e! !func\n---\ntask: x\nprocess_docs: !e!tion utils.f\n", ":4: !function utils.f"),
    "python tag": ("task: x\nmetadata: !!python/object/apply:os.system [ls]\n", ":2: python/object/apply:os.system"),
    "unsafe": ("task: x\nunsafe_code: true\n", "executes code that the model writes"),
    "metric of the hub": ("task: x\nmetric_list: [{metric: code_eval}]\n", "fetches the metric code_eval"),
    "hub by name": ("task: x\nmetric_list: [{metric: acc, hf_evaluate: true}]\n", "fetches the metric acc"),
}


@pytest.mark.parametrize("name", CODE)
def test_code_is_refused_without_trust(name: str, tmp_path: Path) -> None:
    content, told = CODE[name]
    file = text(tmp_path / "t.yaml", content)
    message = refused(file)
    assert told in message
    assert str(file) in message
    assert "--trust-remote-code" in message


def test_code_of_an_included_file_is_found_and_all_files_are_named(tmp_path: Path) -> None:
    inner = text(tmp_path / "inner.yaml", "process_results: !function evil.f\n")
    outer = text(tmp_path / "outer.yaml", "include: inner.yaml\ntask: x\n")
    other = text(tmp_path / "other.yaml", "task: y\nprocess_docs: !function evil.g\n")
    message = refused(outer, other)
    assert f"{inner}:1: !function evil.f" in message
    assert f"{other}:2: !function evil.g" in message


def test_trusted_code_runs(tmp_path: Path) -> None:
    text(tmp_path / "trusted_functions.py", "def first(docs):\n    return docs.select(range(2))\n")
    file = write(tmp_path, "mine", rows(5), **CHOICES)
    content = file.read_text().replace(
        '"task": "mine"', '"task": "mine", "process_docs": !function trusted_functions.first'
    )
    text(file, content)
    assert "!function" in refused(file)
    task = check_lm_eval([str(file)], trust_remote_code=True).tasks[str(file)][0]
    assert len(task.eval_docs) == 2


def test_templates_of_untrusted_tasks_are_kept_in_the_sandbox(tmp_path: Path) -> None:
    reaching = CHOICES | {"doc_to_text": "{{ question.__class__.__mro__[1].__subclasses__() }}"}
    assert "SecurityError" in refused(write(tmp_path, "mine", rows(2), **reaching))


BAD = {
    "not YAML": ("task: x\n  a: [\n", ":2:4: not valid YAML"),
    "a list": ("- task: x\n", "is no task of lm-eval"),
    "empty": ("", "is no task of lm-eval"),
    "neither": ("dataset_path: json\n", "neither `task` nor `group`"),
    "unknown key": ("task: x\nfoo: 1\n", "'foo'"),
    "itself": ("include: t.yaml\ntask: x\n", "includes itself"),
    "deep": ("task: x\na: " + "[" * 5000 + "]" * 5000, "nested too deeply|lm-eval cannot use"),
    "odd member": ("group: g\ntask: [[1]]\n", "lm-eval cannot use this task"),
    "no data": ("task: x\noutput_type: multiple_choice\n", "lm-eval cannot use this task"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_told_in_one_sentence(name: str, tmp_path: Path) -> None:
    import re

    content, told = BAD[name]
    message = refused(text(tmp_path / "t.yaml", content))
    assert re.search(told, message), message
    assert str(tmp_path / "t.yaml") in message
    assert len(message) < 700


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_bytes(b"task: \xff\n")
    assert "not UTF-8" in refused(tmp_path / "t.yaml")


def test_what_is_not_there(tmp_path: Path) -> None:
    file = write(tmp_path, "mine", rows(2), **CHOICES)
    (tmp_path / "mine.jsonl").unlink()
    inner = text(tmp_path / "i.yaml", "include: none.yaml\ntask: x\n")
    for missing in (file, inner, tmp_path / "none.yaml", "~nobody-here/t.yaml", "a\0.yaml"):
        with pytest.raises(MissingResourceError):
            check_lm_eval([str(missing)])


@pytest.mark.parametrize(("count", "told"), [(1, "has 1 items"), (0, "cannot use|no rows|has 0")])
def test_too_few_items(count: int, told: str, tmp_path: Path) -> None:
    import re

    assert re.search(told, refused(write(tmp_path, "mine", rows(count), **CHOICES)))


def test_perplexity_is_no_task_with_right_answers(tmp_path: Path) -> None:
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"}
    assert "has no right and wrong answers" in refused(write(tmp_path, "mine", rows(2), **rolling))


def test_local_data_wait_for_no_network(tmp_path: Path) -> None:
    """In a fresh process that may not connect anywhere and was not told to be offline."""
    file = write(tmp_path, "mine", rows(2), **CHOICES)
    code = (
        "import socket, sys\n"
        "def refuse(*_): raise SystemExit('connects')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from compress.measure.tasks.lm_eval_check import check_lm_eval\n"
        f"print(len(check_lm_eval([{str(file)!r}]).tasks))\n"
    )
    environment = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    environment["HF_HOME"] = str(tmp_path / "hf")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


@pytest.mark.slow
def test_names_of_lm_eval_s_own_tasks() -> None:
    """Slow: lm-eval reads some 14,000 files for its index."""
    message = refused(Path("hellaswg"), Path("arc_esy"))
    assert "no task 'hellaswg' (did you mean `hellaswag`?)" in message
    assert "no task 'arc_esy' (did you mean `arc_easy`?)" in message
    assert "executes code that the model writes" in refused(Path("humaneval"), Path("hellaswag"))
