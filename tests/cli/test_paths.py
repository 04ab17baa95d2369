"""Folders with spaces, Chinese characters and a trailing slash: default output, report, resuming, plan."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny
from commandline import compress, hashes
from test_resume import Interrupting, ctrl_c

from compress.pipeline.job import Options
from compress.pipeline.run import run
from compress.progress import Silent
from compress.recipe.schema import Recipe

QUICK = ("--target", "int8-weight", "--no-bench", "--no-evaluate")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "我的 模型 (1)"
    folder.mkdir()
    tiny.tiny_llama(folder / "小 模型")
    return folder


def test_the_default_output_lies_here_under_the_models_name(place: Path) -> None:
    done = compress("quantize", f"小 模型{os.sep}", *QUICK, "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in place.iterdir()) == ["小 模型", "小 模型-int8-weight"]
    answer = json.loads(done.stdout)
    assert answer["output"] == "小 模型-int8-weight"
    report = json.loads((place / answer["report"]).read_text(encoding="utf-8"))
    assert report["output"] == "小 模型-int8-weight"
    assert report["inputs"]["model"]["source"] == f"小 模型{os.sep}"
    (engine,) = report["serving"]
    assert (engine["engine"], engine["loads"]) == ("vLLM", True)
    assert "小 模型-int8-weight" in (place / "小 模型-int8-weight" / "report" / "report.md").read_text(encoding="utf-8")


def test_an_output_with_a_slash_is_resumed_to_the_same_bytes(place: Path) -> None:
    def recipe(output: str) -> Recipe:
        step = {"quantize": {"target": "int8-weight"}}
        fields = {"version": 1, "model": f"{place / '小 模型'}{os.sep}", "output": f"{place / output}{os.sep}"}
        return Recipe.model_validate(fields | {"steps": [step], "evaluate": None})

    run(recipe("出 口"), Options(), Silent())
    with pytest.raises(KeyboardInterrupt):
        run(recipe("入 口"), Options(), Interrupting("Rounding", 6.5, ctrl_c))
    assert (place / ".入 口.partial").is_dir()
    run(recipe("入 口"), Options(resume=True), Silent())
    assert hashes(place / "入 口") == hashes(place / "出 口")
    assert sorted(path.name for path in place.iterdir()) == ["入 口", "出 口", "小 模型"]


def test_a_plan_of_it_says_what_serves_it(place: Path) -> None:
    (place / "食谱 一.yaml").write_text(
        "version: 1\nmodel: ./小 模型/\noutput: 出 口/\nsteps:\n  - quantize: {target: int4}\n", encoding="utf-8"
    )
    done = compress("plan", "食谱 一.yaml", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "vLLM" in done.stdout
    assert "loads it, as far as its sources tell (read, not run)" in " ".join(done.stdout.split())
    data = json.loads(compress("plan", "食谱 一.yaml", "--json", cwd=place).stdout)["plan"]
    assert [engine["engine"] for engine in data["serving"]] == ["vLLM"]
    assert data["serving"][0]["reasons"][0].startswith("outside Marlin's tiles")
