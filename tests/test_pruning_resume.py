"""A pruning run that is killed or interrupted anywhere goes on with `--resume` to the same bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commandline import base_environment, hashes
from test_resume import Interrupting, ctrl_c, never

from compress.errors import MismatchError
from compress.journal import finished
from compress.pipeline.job import Options
from compress.pipeline.run import run
from compress.recipe.schema import Recipe

BLOCKS = 4
PRUNE = {"prune": {"keep": {"ffn": 0.5, "heads": 4, "layers": 3}}}
QUANTIZE = {"quantize": {"target": "int4", "group_size": 32}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    return tiny.tiny_llama(folder, dtype=torch.bfloat16, num_hidden_layers=BLOCKS)


def recipe(model: Path, output: Path, *steps: dict[str, Any], **changes: Any) -> Recipe:
    fields = {
        "version": 1,
        "model": str(model),
        "output": str(output),
        "calibration": {"samples": 6, "length": 64},
        "steps": list(steps or (PRUNE, QUANTIZE)),
        "evaluate": None,
    }
    return Recipe.model_validate(fields | changes)


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a run that nothing interrupted."""
    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("straight") / "out"
    run(recipe(model, output), Options(), Interrupting("", 0, never))
    return hashes(output)


class Listening(Interrupting):
    """Remembers which phases there were."""

    def __init__(self) -> None:
        super().__init__("", 0, never)
        self.phases: list[str] = []

    def phase(self, name: str, total: float) -> Any:
        self.phases.append(name)
        return super().phase(name, total)


def interrupt(wanted: Recipe, phase: str, after: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Runs until Ctrl-C; returns the parts that are kept of the step `prune` and of the next one."""
    with pytest.raises(KeyboardInterrupt) as caught:
        run(wanted, Options(), Interrupting(phase, after, ctrl_c))
    partial = _partial(wanted)
    kept = finished(partial / "prune"), finished(partial)
    if any(kept):
        assert any("--resume goes on from there" in note for note in caught.value.__notes__)
    return kept


def _partial(wanted: Recipe) -> Path:
    assert wanted.output is not None
    output = Path(wanted.output)
    return output.with_name(f".{output.name}.partial")


def resume(wanted: Recipe) -> Listening:
    progress = Listening()
    run(wanted, Options(resume=True), progress)
    assert not _partial(wanted).exists()
    return progress


AHEAD = ("ahead-gradients", "ahead-shape")
ALL = (*AHEAD, *(f"block-{index:05d}" for index in range(BLOCKS)))


@pytest.mark.parametrize(
    ("phase", "after", "kept"),
    [
        ("Pruning blocks", 2.0, (ALL[:3], ALL[:4])),
        ("write weights", 1.0, (ALL,)),
        ("Proving the pruned model", 1.0, (ALL,)),
    ],
)
def test_interrupted_while_it_prunes(
    model: Path, straight: dict[str, str], tmp_path: Path, phase: str, after: float, kept: tuple[tuple[str, ...], ...]
) -> None:
    wanted = recipe(model, tmp_path / "out")
    pruned, quantized = interrupt(wanted, phase, after)
    assert pruned in kept
    assert quantized == ()
    again = resume(wanted)
    assert not {"Gradients", "Leaving layers out"} & set(again.phases)
    assert f"Resuming after {len(pruned)} finished parts." in again.said
    assert hashes(tmp_path / "out") == straight


def test_interrupted_in_the_step_after_it(model: Path, straight: dict[str, str], tmp_path: Path) -> None:
    """The pruned folder is written again from the journal, the same as before: else the next step's would not fit."""
    wanted = recipe(model, tmp_path / "out")
    pruned, quantized = interrupt(wanted, "Quantizing blocks", 2.0)
    assert pruned == ALL
    assert quantized
    assert not (_partial(wanted) / "pruned").exists()
    again = resume(wanted)
    assert f"Resuming after {len(ALL)} finished parts." in again.said
    assert any(line.startswith(f"Resuming after {len(quantized)} finished block") for line in again.said)
    assert hashes(tmp_path / "out") == straight


def test_what_comes_later_may_change_before_it_is_resumed(model: Path, tmp_path: Path) -> None:
    interrupt(recipe(model, tmp_path / "out"), "Quantizing blocks", 0.5)
    assert not finished(_partial(recipe(model, tmp_path / "out")))  # no block of the quantization was done
    changed = recipe(model, tmp_path / "out", PRUNE, {"quantize": {"target": "int8-weight"}})
    resume(changed)
    run(recipe(model, tmp_path / "new", *changed.model_dump(mode="json")["steps"]), Options(), Listening())
    assert hashes(tmp_path / "out") == hashes(tmp_path / "new")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed: the interrupted run had 0"),
        (
            {"steps": [{"prune": {"keep": {"ffn": 0.5, "heads": 4, "layers": 2}}}, QUANTIZE]},
            r"prune\.shapes\[0\]\.layers",
        ),
        ({"steps": [{"prune": PRUNE["prune"] | {"importance": "activation"}}, QUANTIZE]}, r"prune\.importance"),
        ({"calibration": {"samples": 5, "length": 64}}, r"calibration\.samples"),
    ],
)
def test_what_would_change_the_pruned_model_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    wanted = recipe(model, tmp_path / "out")
    interrupt(wanted, "Pruning blocks", 2.0)
    fields = wanted.model_dump(mode="json", exclude={"steps"}) | {"steps": [PRUNE, QUANTIZE]} | changes
    with pytest.raises(MismatchError, match=named):
        run(Recipe.model_validate(fields), Options(resume=True), Listening())


def test_without_resume_it_starts_anew(model: Path, straight: dict[str, str], tmp_path: Path) -> None:
    wanted = recipe(model, tmp_path / "out")
    pruned, _ = interrupt(wanted, "Pruning blocks", 2.0)
    progress = Listening()
    run(wanted, Options(), progress)
    assert any(line.startswith(f"Discarding {len(pruned)} finished parts") for line in progress.said)
    assert "Gradients" in progress.phases
    assert hashes(tmp_path / "out") == straight


def test_killed_twice(model: Path, straight: dict[str, str], tmp_path: Path) -> None:
    """kill -9 in the walk of the pruning, and again in the step after it."""
    wanted = recipe(model, tmp_path / "out")
    (tmp_path / "recipe.json").write_text(wanted.model_dump_json())
    kept = []
    for journal, count in ((_partial(wanted) / "prune", 3), (_partial(wanted), 1)):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "recipe.json"), "--resume" if kept else ""],
            stderr=subprocess.DEVNULL,
            env=base_environment() | {"OMP_NUM_THREADS": "1"},
        )
        deadline = time.monotonic() + 300
        while len(finished(journal)) < count and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.kill()
        process.wait(60)
        assert process.returncode == -signal.SIGKILL
        kept.append(len(finished(journal)))
        assert kept[-1] >= count
    resume(wanted)
    assert hashes(tmp_path / "out") == straight


KILLED = """
import sys
from pathlib import Path
from compress.pipeline.job import Options
from compress.pipeline.run import run
from compress.progress import Silent
from compress.recipe.schema import Recipe
run(Recipe.model_validate_json(Path(sys.argv[1]).read_text()), Options(resume=bool(sys.argv[2])), Silent())
"""
