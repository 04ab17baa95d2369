"""Tasks in a plan: what is refused before anything runs, and what the items can show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compress.errors import MissingResourceError, UsageError
from compress.plan.tasks import plan_tasks, powers
from compress.recipe.options import comparison_from_options

CHOICES = [{"question": f"q{i}?", "choices": ["a", "b", "c"], "answer": i % 3} for i in range(200)]
LABELS = [{"text": f"t{i}", "label": i % 2} for i in range(10)]


def task_file(folder: Path, rows: list[dict[str, Any]], name: str = "quiz.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def asked(tasks: list[str], **options: Any) -> Any:
    given = {"ORIGINAL": "a", "RESULT": "b", "--evaluate": True, "--task": tasks}
    return comparison_from_options(given | {f"--{name.replace('_', '-')}": value for name, value in options.items()})


def test_the_items_and_what_they_can_show(tmp_path: Path) -> None:
    wish = asked([task_file(tmp_path, CHOICES)], gate=["accuracy.drop <= 1pt @95%"])
    (power,) = powers(wish, plan_tasks(wish, "decoder"))
    assert (power.name, power.items) == ("quiz", 200)
    assert power.drop == pytest.approx(4.11, abs=0.01)
    assert (power.asked, power.needed) == (1.0, 3162)


def test_a_limit_of_items_holds_for_all_tasks_but_those_with_their_own(tmp_path: Path) -> None:
    wish = asked([task_file(tmp_path, CHOICES), "next_sentence"], task_items="50")
    planned = plan_tasks(wish, "decoder")
    assert [len(one.items.items) for one in planned if one.items] == [50, 50]
    assert [power.name for power in powers(wish, planned)] == ["quiz", "next_sentence", "all tasks"]
    assert powers(wish, planned)[-1].items == 100


def test_a_gate_on_all_tasks_is_no_gate_on_each(tmp_path: Path) -> None:
    wish = asked([task_file(tmp_path, CHOICES), "next_sentence"], gate=["accuracy.drop <= 3pt @95%"])
    assert [power.asked for power in powers(wish, plan_tasks(wish, "decoder"))] == [None, None, 3.0]


def test_a_gate_of_one_task_is_no_gate_of_the_others(tmp_path: Path) -> None:
    wish = asked([task_file(tmp_path, CHOICES), "next_sentence"], gate=["accuracy[quiz].drop <= 3pt @95%"])
    assert [power.asked for power in powers(wish, plan_tasks(wish, "decoder"))] == [3.0, None, None]


def test_a_task_of_lm_eval_is_not_known_before_the_run() -> None:
    wish = asked(["hellaswag"])
    (planned,) = plan_tasks(wish, "decoder")
    assert planned.items is None
    assert powers(wish, (planned,)) == ()


def test_tasks_that_the_model_cannot_answer(tmp_path: Path) -> None:
    classes = task_file(tmp_path, LABELS, "labels.jsonl")
    with pytest.raises(UsageError, match=r"labels \(classification\) is for encoders"):
        plan_tasks(asked([classes]), "decoder")
    with pytest.raises(UsageError) as caught:
        plan_tasks(asked([task_file(tmp_path, CHOICES), "hellaswag", classes]), "encoder")
    assert caught.value.message.count("this is an encoder") == 2


def test_a_gate_on_a_task_that_is_not_there(tmp_path: Path) -> None:
    wish = asked([task_file(tmp_path, CHOICES)], gate=["accuracy[quizz] >= 10%"])
    with pytest.raises(UsageError, match=r"no task is called `quizz` \(did you mean `quiz`\?\)"):
        plan_tasks(wish, "decoder")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingResourceError, match=r"nothing\.jsonl"):
        plan_tasks(asked([str(tmp_path / "nothing.jsonl")]), "decoder")
    with pytest.raises(MissingResourceError, match=r"nothing\.yaml"):
        plan_tasks(asked([str(tmp_path / "nothing.yaml")]), "decoder")


def test_gates_on_accuracy_need_a_task() -> None:
    with pytest.raises(UsageError, match=r"`accuracy.drop` is measured by `evaluate.tasks`, which is empty"):
        asked([], gate=["accuracy.drop <= 1pt"])
