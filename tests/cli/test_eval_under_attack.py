"""What went wrong with `eval`, `bench` and `report` once, and must not again: each test is one fault of that kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from commandline import base_environment, compress
from safetensors.torch import load_file, save_file

QUICK = ("--evaluation-tokens", "600")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("model") / "m", max_position_embeddings=1024)


def lm_eval_task(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    path = folder / "mine.yaml"
    path.write_text(json.dumps(task | changes))  # JSON is YAML
    return path


ROWS = [{"question": f"q{n}", "choices": ["a", "b"], "answer": n % 2} for n in range(8)]


def test_windows_fit_the_smaller_of_the_two_models(model: Path, tmp_path: Path) -> None:
    short = tiny.tiny_llama(tmp_path / "short", max_position_embeddings=64)
    done = compress("eval", model, short, *QUICK)
    assert done.returncode == 0, done.stderr
    assert "Windows are 64 tokens instead of 512" in done.stderr


def test_weights_that_are_not_finite_are_seen_where_no_text_meets_them(model: Path, tmp_path: Path) -> None:
    broken = tiny.tiny_llama(tmp_path / "broken", max_position_embeddings=1024)
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][-1] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    done = compress("eval", model, broken, *QUICK)
    assert done.returncode == 10
    assert "model.embed_tokens.weight" in done.stderr


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (ROWS, {"doc_to_target": "zz"}, "document 0 has the right answer 'zz', no choice"),
        ([row | {"answer": 7} for row in ROWS], {}, "`doc_to_target`"),
        ([*ROWS, ROWS[0] | {"answer": 7}], {}, "document 8"),
        ([row | {"answer": -1} for row in ROWS], {}, "document 0"),
        (ROWS, {"num_fewshot": 500}, "wants 500 examples before each item"),
        (ROWS, {"num_fewshot": len(ROWS)}, f"wants {len(ROWS)} examples before each item"),
        (ROWS, {"output_type": "loglikelihood", "doc_to_target": "choices"}, "several right continuations"),
    ],
)
def test_tasks_that_nobody_can_answer(
    rows: list[dict[str, Any]], changes: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    task = lm_eval_task(tmp_path, rows, **changes)
    done = compress("eval", model, model, "--task", task, *QUICK, "--gate", "accuracy.losses <= 0")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "fidelity" not in done.stderr, "before a model answers anything"


def test_an_old_verdict_does_not_outlive_a_run_that_fails(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    assert compress("eval", model, model, *QUICK, "-o", folder).returncode == 0
    broken = tiny.tiny_llama(tmp_path / "broken", max_position_embeddings=1024)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert compress("eval", model, broken, *QUICK, "-o", folder).returncode == 10
    assert list(folder.iterdir()) == []  # the folder was there before
    assert compress("report", folder).returncode == 9


def test_a_benchmark_that_is_killed_leaves_no_green_report(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "compress", "bench", str(model), str(model), "--budget", "300s"),
            *("--prompt", "8", "--new-tokens", "4", "--gate", "size <= 1GB", "-o", str(folder)),
        ],
        env=base_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (folder / "report.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    second = compress("eval", model, model, *QUICK, "-o", folder)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert second.returncode == 9
    assert "another run is writing into it" in second.stderr
    again = compress("report", folder)
    assert again.returncode == 4
    assert "INCONCLUSIVE: the benchmark did not finish" in again.stdout
    assert "failures" in (folder / "junit.xml").read_text()
    assert "PASS" not in (folder / "report.md").read_text().splitlines()[1]


@pytest.mark.skipif(os.name != "posix", reason="needs /dev/zero")
def test_a_report_is_a_file(tmp_path: Path) -> None:
    done = compress("report", "/dev/zero")
    assert (done.returncode, "is no file" in done.stderr) == (2, True)
    os.mkfifo(tmp_path / "pipe")
    assert compress("report", tmp_path / "pipe").returncode == 2


def test_a_report_is_not_overwritten_by_its_own_rendering(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    assert compress("eval", model, model, *QUICK, "-o", folder).returncode == 0
    before = (folder / "report.json").read_bytes()
    done = compress("report", folder, "--format", "md", "-o", folder / "report.json")
    assert done.returncode == 2
    assert (folder / "report.json").read_bytes() == before


def test_a_report_that_was_edited_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    assert compress("eval", model, model, *QUICK, "--gate", "kl.mean <= 0.1", "-o", folder).returncode == 0
    report = json.loads((folder / "report.json").read_text())

    def refused(**changes: Any) -> None:
        edited = tmp_path / "edited.json"
        edited.write_text(json.dumps(report | changes))
        done = compress("report", edited)
        assert done.returncode == 2, changes
        assert done.stdout == ""

    verdict = report["verdict"]
    (gate,) = verdict["gates"]
    refused(verdict=verdict | {"headline": "FAIL: all bad"})
    refused(verdict=verdict | {"outcome": "FAIL"})
    refused(verdict=verdict | {"gates": [gate | {"value": 99.0}]})
    refused(verdict=verdict | {"gates": [gate | {"threshold": -5.0}]})
    refused(verdict=verdict | {"gates": [gate | {"expression": "size <= 1MB"}]})
    refused(verdict=verdict | {"gates": [], "headline": "PASS: no gate was asked, so nothing was judged"})
    measured = report["measurements"]
    refused(measurements=[measured[0] | {"value": "3"}, *measured[1:]])


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(model: Path) -> None:
    done = compress("eval", model, model, *QUICK, "-o", "/dev/null/x")
    assert done.returncode in (2, 9)
    assert "fidelity" not in done.stderr


def test_prompts_that_no_memory_holds_are_refused_at_once(model: Path) -> None:
    done = compress("bench", model, "--budget", "2s", "--prompt", "1000", "--new-tokens", "4", "--batch", "10000000")
    assert done.returncode == 9
    assert "needs more than" in done.stderr
    assert "latency" not in done.stderr


def test_all_examples_of_another_split_may_be_used(model: Path, tmp_path: Path) -> None:
    files = {"test": str(tmp_path / "rows.jsonl"), "train": str(tmp_path / "rows.jsonl")}
    changes = {"dataset_kwargs": {"data_files": files}, "training_split": "train", "fewshot_split": "train"}
    task = lm_eval_task(tmp_path, ROWS, num_fewshot=len(ROWS), **changes)
    done = compress("eval", model, model, "--task", task, *QUICK)
    assert done.returncode == 0, done.stderr


def test_what_is_not_ours_beside_the_report_folder_stays(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".report.lock").write_text("precious")
    done = compress("eval", model, model, *QUICK, "-o", tmp_path / "report")
    assert (done.returncode, ".report.lock is in the way" in done.stderr) == (2, True)
    assert (tmp_path / ".report.lock").read_text() == "precious"


def test_the_report_of_a_run_is_not_replaced_by_that_of_an_eval(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    quick = ("--algorithm", "rtn", "--no-bench", "--no-evaluate")
    assert compress("quantize", model, "--target", "int8", *quick, "-o", output).returncode == 0
    done = compress("eval", model, output, *QUICK, "-o", output / "report")
    assert (done.returncode, "lies in a folder that compress wrote" in done.stderr) == (2, True)
    assert compress("report", output).returncode == 0


def test_a_folder_that_was_made_for_nothing_is_removed(model: Path, tmp_path: Path) -> None:
    broken = tiny.tiny_llama(tmp_path / "broken", max_position_embeddings=1024)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    before = sorted(tmp_path.iterdir())
    assert compress("eval", model, broken, *QUICK, "-o", tmp_path / "new" / "report").returncode == 10
    assert sorted(tmp_path.iterdir()) == before
