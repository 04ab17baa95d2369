"""Every value of two real runs is found again in the raw files they leave, by a script without the package."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_bert, tiny_llama

from compress.metrics import METRICS
from compress.pipeline.job import Options
from compress.pipeline.run import run
from compress.progress import Silent
from compress.recipe.schema import Recipe

SCRIPT = Path(__file__).parents[2] / "scripts" / "recompute.py"
COUNTED = {"size", "size.ratio", "bits_per_weight", "parameters", "kv_bytes"}
TASK = "".join(
    json.dumps({"id": f"q{row}", "question": f"Row {row} is", "choices": ["odd", "even", "both"], "answer": row % 2})
    + "\n"
    for row in range(40)
)


def finished(model: Path, folder: Path, **measured: Any) -> Path:
    step = {"quantize": {"target": "int4", "algorithm": "rtn"}}
    asked = {"version": 1, "model": str(model), "output": str(folder / "out"), "steps": [step]} | measured
    run(Recipe.model_validate(asked), Options(), Silent())
    return folder / "out" / "report"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "parity.jsonl").write_text(TASK)
    evaluate = {
        "fidelity": {"tokens": 4096, "length": 64},
        "tasks": [str(folder / "parity.jsonl")],
        "generation": {"prompts": 6, "prompt": 16, "new_tokens": 24},
    }
    bench = {"prompt": [8, 12], "new_tokens": 4, "budget": "1s"}
    return finished(tiny_llama(folder / "model"), folder, evaluate=evaluate, bench=bench)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    evaluate = {"fidelity": {"tokens": 4096, "length": 64}, "retrieval": {"documents": 60}}
    return finished(tiny_bert(folder / "model"), folder, evaluate=evaluate, bench=None)


def recompute(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, check=False)


def measurements(folder: Path) -> list[dict[str, Any]]:
    return [one for one in json.loads((folder / "report.json").read_text())["measurements"] if one["value"] is not None]


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_every_value_is_found_again(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    done = recompute(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [one["metric"] for one in measurements(folder) if one["metric"] not in COUNTED]
    assert [line.split()[0] for line in done.stdout.splitlines()] == expected


def test_the_two_runs_show_nearly_all_that_can_be_measured(decoder: Path, encoder: Path) -> None:
    shown = {one["metric"] for folder in (decoder, encoder) for one in measurements(folder)}
    tails = {metric for metric in METRICS if metric.endswith((".p90", ".p99"))}  # need more rounds than a second gives
    assert METRICS.keys() - shown - tails <= {
        *("latency.forward", "latency.forward.ratio", "accuracy.recovery_corrected", "cpu.ratio")
    }
    floors = {one["metric"] for one in measurements(decoder) if one["subject"] == "original/original"}
    assert floors >= {"kl.mean", "tv.mean", "top1.agreement", "perplexity.ratio", "latency.ttft.ratio"}


@pytest.mark.parametrize(
    ("file", "kind", "key"),
    [
        ("samples.jsonl", "fidelity", "kl"),
        ("samples.jsonl", "floor", "tv"),
        ("samples.jsonl", "task", "result"),
        ("samples.jsonl", "generation", "result"),
        ("latency.jsonl", "sample", "seconds"),
        ("latency.jsonl", "load", "seconds"),
        ("latency.jsonl", "memory", "bytes"),
    ],
)
def test_a_report_that_its_raw_values_do_not_carry_is_told(
    decoder: Path, file: str, kind: str, key: str, tmp_path: Path
) -> None:
    """One row is changed, of samples one that counts."""
    folder = Path(shutil.copytree(decoder, tmp_path / "report"))
    rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    row = next(row for row in rows if row["kind"] == kind and row.get("phase", "measure") == "measure")
    row[key] = changed(row[key])
    (folder / file).write_text("".join(json.dumps(one) + "\n" for one in rows))
    done = recompute(folder)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr


def changed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: not part if isinstance(part, bool) else changed(part) for name, part in value.items()}
    if isinstance(value, list):
        return [value[0] + 1, *value[1:-1]]
    return value * 7 if isinstance(value, int | float) else value


def test_the_script_is_short_and_knows_nothing_of_the_package() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count("\n") <= 50
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) and node.module else [a.name for a in node.names]
        )
    }
    assert imported == {"json", "re", "sys", "pathlib", "numpy", "scipy"}
