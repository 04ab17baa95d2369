"""`--memory`: the same bytes with less memory, however small; refused only where whole models are needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commandline import base_environment, compress, hashes

from compress.errors import MissingResourceError
from compress.pipeline.job import Options
from compress.pipeline.run import run
from compress.progress import Silent
from compress.recipe.schema import Recipe

TINY = 1_000_000  # bytes: less than any model here and its windows need beside the program itself


def recipe(model: Path, output: Path, **step: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "model": str(model),
            "output": str(output),
            "calibration": {"samples": 6, "length": 48, "batch_size": 4},
            "steps": [{"quantize": {"target": "int4"} | step}],
            "evaluate": None,
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("model") / "m", dtype=torch.bfloat16, num_hidden_layers=3)


STEPS: dict[str, dict[str, Any]] = {"gptq": {}, "rtn": {"algorithm": "rtn"}, "smooth": {"target": "int8"}}


@pytest.mark.parametrize("step", STEPS)
def test_less_memory_gives_the_same_bytes(tmp_path: Path, model: Path, step: str) -> None:
    straight = run(recipe(model, tmp_path / "straight", **STEPS[step]), Options(), Silent())
    limited = run(recipe(model, tmp_path / "limited", **STEPS[step]), Options(memory=TINY), Silent())
    assert limited.report.proof is not None
    assert straight.report.proof is not None
    assert limited.report.proof["method"] == "independent reader, block by block"
    assert straight.report.proof["method"] != limited.report.proof["method"]
    assert hashes(tmp_path / "limited") == hashes(tmp_path / "straight")


def test_a_killed_run_goes_on_with_less_memory(tmp_path: Path, model: Path) -> None:
    """Interrupted while windows wait in memory, resumed with windows that wait on the disk."""
    from test_resume import Interrupting, ctrl_c

    run(recipe(model, tmp_path / "straight"), Options(), Silent())
    wanted = recipe(model, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run(wanted, Options(), Interrupting("Quantizing blocks", 2.0, ctrl_c))
    progress = Interrupting("", 0, lambda: None)
    run(wanted, Options(memory=TINY, resume=True), progress)
    assert any("Resuming after" in line for line in progress.said)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "straight")


def test_many_small_files_are_no_trouble(tmp_path: Path, model: Path) -> None:
    """Every tensor in a file of its own, more files than a process may open at once."""
    import resource

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors")
    names = {name: f"model-{index:05d}-of-{len(tensors):05d}.safetensors" for index, name in enumerate(tensors, 1)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    opened = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 64
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + len(names) // 2, limits[1]))
    try:
        step = {"algorithm": "rtn", "max_shard_size": "1kB"}
        result = run(recipe(folder, tmp_path / "out", **step), Options(memory=TINY), Silent())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list(result.output.glob("*.safetensors"))) > len(names)


def test_whole_models_are_refused_before_the_work_with_the_way_out(tmp_path: Path, model: Path) -> None:
    given = ("--memory", "1MB", "--prompt", "16", "--new-tokens", "8")
    answer = compress("quantize", model, "-t", "int4", "-o", tmp_path / "out", *given)
    assert answer.returncode == MissingResourceError.exit_code
    assert "--memory" in answer.stderr
    assert "--no-evaluate --no-bench" in answer.stderr
    assert not (tmp_path / "out").exists()


def test_a_size_without_a_unit_is_refused(tmp_path: Path, model: Path) -> None:
    answer = compress("quantize", model, "-t", "int4", "-o", tmp_path / "out", "--memory", "8")
    assert answer.returncode == 2
    assert "--memory" in answer.stderr


PEAK = """
import resource, sys
from compress.pipeline.job import Options
from compress.pipeline.run import run
from compress.progress import Silent
from compress.recipe.schema import Recipe
run(Recipe.model_validate_json(sys.argv[1]), Options(memory=1_000_000), Silent())
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
own = int(status["VmHWM"].split()[0])  # ru_maxrss would count what the process that started this one had
print(own * 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def peaks(model: Path, output: Path) -> list[int]:
    """Peak resident bytes of the process that quantizes `model` and of the one that proves it."""
    asked = recipe(model, output, algorithm="rtn").model_dump_json()
    answer = subprocess.run(
        [sys.executable, "-c", PEAK, asked],
        capture_output=True,
        text=True,
        check=True,
        env=base_environment() | {"OMP_NUM_THREADS": "1"},
    )
    return [int(number) for number in answer.stdout.split()[-2:]]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_does_not_grow_with_the_number_of_blocks(tmp_path: Path) -> None:
    """Blocks of 17 MB as float32: 12 more of them would be 201 MB, were they in memory together."""
    width = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 4}
    found = []
    for blocks in (4, 16):
        model = tiny.tiny_llama(
            tmp_path / f"m{blocks}", dtype=torch.bfloat16, num_hidden_layers=blocks, head_dim=128, **width
        )
        found.append(peaks(model, tmp_path / f"out{blocks}"))
    (few, few_proving), (many, many_proving) = found
    assert many - few < 80_000_000, found
    assert many_proving - few_proving < 80_000_000, found
