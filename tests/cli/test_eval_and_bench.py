"""`compress eval` and `compress bench` as processes: exit codes, both streams, and the report they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from commandline import compress, hashes
from safetensors.torch import load_file, save_file

QUICK = ("--evaluation-tokens", "600")
QUICK_BENCH = ("--budget", "2s", "--prompt", "8", "--new-tokens", "4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama, and the same with its first block's weights rounded to 16 levels."""
    folder = tmp_path_factory.mktemp("models")
    original = tiny.tiny_llama(folder / "original", max_position_embeddings=1024)
    result = tiny.tiny_llama(folder / "result", max_position_embeddings=1024)
    weights = load_file(result / "model.safetensors")
    for name in weights:
        if "layers.0." in name and name.endswith("proj.weight"):
            step = weights[name].abs().max() / 8
            weights[name] = (weights[name] / step).round() * step
    save_file(weights, result / "model.safetensors", metadata={"format": "pt"})
    return original, result


def answer(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = compress(*arguments, "--json")
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["exit_code"] == code
    return found


def values(found: dict[str, Any], metric: str, task: str | None = None) -> dict[str, float | None]:
    return {m["subject"]: m["value"] for m in found["measurements"] if m["metric"] == metric and m["task"] == task}


def test_eval_compares_answers_and_leaves_a_report(models: tuple[Path, Path], tmp_path: Path) -> None:
    original, result = models
    before = hashes(original) | hashes(result)
    folder = tmp_path / "report"
    found = answer("eval", original, result, "--task", "next_sentence", "--task-items", "12", *QUICK, "-o", folder)
    assert values(found, "kl.mean")["result/original"] is not None
    assert set(values(found, "accuracy", "next_sentence")) == {"original", "result"}
    assert values(found, "accuracy.drop") == values(found, "accuracy.drop", "next_sentence")
    assert values(found, "latency.tpot") == {}
    files = {path.name for path in folder.iterdir()}
    assert files == {"report.json", "report.md", "report.html", "junit.xml", "metrics.json", "samples.jsonl"}
    report = json.loads((folder / "report.json").read_text())
    assert (report["command"], report["inputs"]["result"]["source"]) == ("eval", str(result))
    assert report["tasks"][0]["items"] == 12
    assert hashes(original) | hashes(result) == before


def test_a_model_against_itself_shows_nothing(models: tuple[Path, Path]) -> None:
    found = answer("eval", models[0], models[0], *QUICK, "--gate", "kl.mean <= 0", "--gate", "top1.agreement >= 100%")
    assert values(found, "kl.mean")["result/original"] == 0
    assert values(found, "perplexity.ratio")["result/original"] == 1


def test_the_exit_code_is_that_of_the_gates(models: tuple[Path, Path]) -> None:
    options = (*models, "--task", "next_sentence", "--task-items", "12", *QUICK)
    failed = answer("eval", *options, "--gate", "kl.mean <= 0", code=3)
    assert failed["verdict"]["outcome"] == "FAIL"
    undecided = answer("eval", *options, "--gate", "accuracy.drop <= 0.5pt @95%", code=4)
    assert "there are 12 items" in undecided["verdict"]["gates"][0]["reason"]


def test_bench_of_one_model_shows_its_times_and_the_noise_floor(models: tuple[Path, Path]) -> None:
    found = answer("bench", models[0], *QUICK_BENCH)
    assert set(values(found, "latency.tpot")) == {"original"}
    assert set(values(found, "latency.tpot.ratio")) == {"original/original"}
    assert {m["definition_id"] for m in found["measurements"] if m["metric"] == "latency.ttft"} == {"latency.ttft/1"}


def test_bench_of_two_leaves_every_sample(models: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "report"
    found = answer("bench", *models, *QUICK_BENCH, "--batch", "1,2", "-o", folder)
    batches = {m["conditions"]["batch"] for m in found["measurements"] if m["metric"] == "latency.ttft.ratio"}
    assert batches == {1, 2}
    rows = [json.loads(line) for line in (folder / "latency.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"conditions", "load", "memory", "sample"}
    assert {row["phase"] for row in rows if row["kind"] == "sample"} == {"warm-up", "floor", "measure"}
    assert not (folder / "samples.jsonl").exists()


def test_a_precision_that_no_machine_gives_in_time_is_exit_code_8(models: tuple[Path, Path]) -> None:
    found = answer("bench", *models, *QUICK_BENCH, "--precision", "0.0001%", code=8)
    assert found["verdict"]["outcome"] == "INCONCLUSIVE"
    assert "blocks" in found["verdict"]["headline"]


def bad(*arguments: str | Path) -> str:
    done = compress(*arguments)
    assert done.returncode in (2, 9), done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_bad_input(models: tuple[Path, Path], tmp_path: Path) -> None:
    original, result = models
    one = tmp_path / "one.jsonl"
    one.write_text('{"question": "a", "choices": ["b", "c"], "answer": 0}\n')
    assert "at least 2" in bad("eval", original, result, "--task", one)
    assert "nothing.jsonl" in bad("eval", original, result, "--task", tmp_path / "nothing.jsonl")
    assert "did you mean" in bad("eval", original, result, "--gate", "kl.maen <= 1")
    assert "measured by `bench`" in bad("eval", original, result, "--gate", "latency.tpot <= 1ms")
    assert "positions" in bad("bench", original, "--prompt", "5000")
    assert "is a model's folder" in bad("eval", original, result, "-o", result)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    assert "notes.txt" in bad("eval", original, result, "-o", tmp_path / "mine")
    assert "no_such_folder" in bad("eval", original, "./no_such_folder")


def test_models_that_cannot_be_compared(models: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny.tiny_llama(tmp_path / "other", vocab_size=300)
    assert "vocabulary" in bad("eval", models[0], other)
    encoder = tiny.tiny_bert(tmp_path / "encoder")
    assert "kind" in bad("eval", models[0], encoder)


def test_logits_that_are_not_finite(models: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tiny.tiny_llama(tmp_path / "broken", max_position_embeddings=1024)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    done = compress("eval", models[0], broken, *QUICK)
    assert done.returncode == 10
    assert "model.norm.weight: 1 of 64 values" in done.stderr
