"""Killed, interrupted, out of space, and resumed: the same bytes as a straight run, or a refusal that says why not."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commandline import base_environment, compress, hashes

from compress.errors import MismatchError, MissingResourceError, UsageError
from compress.journal import finished
from compress.model.checkpoint import open_checkpoint
from compress.pipeline.job import Options
from compress.pipeline.run import run
from compress.plan.estimate import STATE_SLOTS
from compress.plan.machine import machine
from compress.plan.memory import state_bytes
from compress.plan.planning import make_plan
from compress.progress import Advance, Silent
from compress.recipe.schema import Recipe

BLOCKS, SAMPLES, LENGTH = 12, 6, 64
QUICK = ("--target", "int4", "--no-bench", "--no-evaluate", "--samples", str(SAMPLES), "--length", str(LENGTH))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    return tiny.tiny_llama(folder, dtype=torch.bfloat16, num_hidden_layers=BLOCKS)


def recipe(model: Path, output: Path, **changes: Any) -> Recipe:
    fields = {
        "version": 1,
        "model": str(model),
        "output": str(output),
        "calibration": {"samples": SAMPLES, "length": LENGTH},
        "steps": [{"quantize": {"target": "int4"}}],
        "evaluate": None,
    }
    return Recipe.model_validate(fields | changes)


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a run that nothing interrupted."""
    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("straight") / "out"
    run(recipe(model, output), Options(), Silent())
    return hashes(output)


class Interrupting(Silent):
    """Does something when a phase has come to a share of its work, and remembers what was said."""

    def __init__(self, phase: str, done: float, action: Callable[[], None]) -> None:
        self._phase, self._at, self._action = phase, done, action
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)

    @contextmanager
    def phase(self, name: str, total: float) -> Iterator[Advance]:
        del total
        done, due = 0.0, name == self._phase

        def advance(amount: float) -> None:
            nonlocal done, due
            done += amount
            if due and done >= self._at - 1e-6:
                due = False
                self._action()

        yield advance


def ctrl_c() -> None:
    raise KeyboardInterrupt


def never() -> None: ...


def interrupt(wanted: Recipe, *, phase: str = "Quantizing blocks", after: float = 3.0) -> tuple[str, ...]:
    """Runs until Ctrl-C in the middle; returns the parts that are kept."""
    with pytest.raises(KeyboardInterrupt):
        run(wanted, Options(), Interrupting(phase, after, ctrl_c))
    assert wanted.output is not None
    output = Path(wanted.output)
    return finished(output.with_name(f".{output.name}.partial"))


def resume(wanted: Recipe) -> list[str]:
    progress = Interrupting("", 0, never)
    run(wanted, Options(resume=True), progress)
    return progress.said


def start(model: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "compress", "quantize", str(model), *QUICK, "-o", str(output), *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=base_environment() | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_blocks(output: Path, count: int, process: subprocess.Popen[str]) -> None:
    partial, deadline = output.with_name(f".{output.name}.partial"), time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if len(finished(partial)) >= count:
            return
        time.sleep(0.002)
    raise AssertionError(f"the run ended or hung before it had finished {count} blocks")


def test_killed_at_five_random_places(model: Path, straight: dict[str, str], tmp_path: Path) -> None:
    """kill -9, each time while a run goes on with what the one before had finished; the places are random."""
    output, chance = tmp_path / "out", random.Random(20)
    places = sorted(chance.sample(range(1, BLOCKS + 1), 5))
    kept: list[int] = []
    for place in places:
        process = start(model, output, *(["--resume"] if kept else []))
        wait_for_blocks(output, place, process)
        time.sleep(chance.random() * 0.05)  # anywhere in the work on a block, or in writing it
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        kept.append(len(finished(tmp_path / ".out.partial")))
        assert not output.exists()
    assert kept == sorted(kept)
    assert kept[0] >= places[0]
    done = compress("quantize", model, *QUICK, "-o", output, "--resume", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert f"Resuming after {kept[-1]} finished blocks" in done.stderr
    assert hashes(output) == straight
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_signal_keeps_the_work_and_says_where(model: Path, tmp_path: Path) -> None:
    process = start(model, tmp_path / "out")
    wait_for_blocks(tmp_path / "out", 1, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    kept = finished(tmp_path / ".out.partial")
    assert kept
    counted = "1 finished block is" if len(kept) == 1 else f"{len(kept)} finished blocks are"
    assert f"{counted} kept in {tmp_path / '.out.partial'}" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert not (tmp_path / ".out.partial.lock").exists()


def test_interrupted_and_resumed(model: Path, straight: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-C in the middle of a block, then once more, while the resumed run works."""
    wanted = recipe(model, tmp_path / "out")
    assert len(interrupt(wanted, after=3.3)) == 3
    with pytest.raises(KeyboardInterrupt):
        run(wanted, Options(resume=True), Interrupting("Quantizing blocks", 7.5, ctrl_c))
    assert len(finished(tmp_path / ".out.partial")) == 7
    assert any(message.startswith("Resuming after 7 finished blocks") for message in resume(wanted))
    assert hashes(tmp_path / "out") == straight
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    assert report["environment"]["resumed_after"] == "block-00006"
    with pytest.raises(UsageError, match="not empty"):
        resume(wanted)
    assert hashes(tmp_path / "out") == straight


def test_a_fresh_run_discards_what_it_does_not_resume(model: Path, tmp_path: Path) -> None:
    wanted = recipe(model, tmp_path / "out")
    assert len(interrupt(wanted, after=5.5)) == 5
    progress = Interrupting("Quantizing blocks", 2.5, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run(wanted, Options(), progress)
    assert any(message.startswith("Discarding 5 finished blocks") for message in progress.said)
    assert len(finished(tmp_path / ".out.partial")) == 2


def test_interrupted_while_it_writes_the_checkpoint(model: Path, straight: dict[str, str], tmp_path: Path) -> None:
    wanted = recipe(model, tmp_path / "out")
    assert len(interrupt(wanted, phase="write weights", after=1)) == BLOCKS
    resume(wanted)
    assert hashes(tmp_path / "out") == straight


def test_rounding_goes_on_with_the_layers_that_are_left(model: Path, tmp_path: Path) -> None:
    steps = [{"quantize": {"target": "int8", "smooth": False}}]
    run(recipe(model, tmp_path / "a", steps=steps), Options(), Silent())
    wanted = recipe(model, tmp_path / "b", steps=steps)
    kept = interrupt(wanted, phase="Rounding", after=20)
    assert len(kept) == 20
    assert any("Resuming after 20 finished layers" in message for message in resume(wanted))
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


@pytest.mark.slow
def test_windows_of_several_lengths(tmp_path: Path) -> None:
    """An encoder's windows are as long as its texts."""
    model = tiny.tiny_bert(tmp_path / "m", num_hidden_layers=4)
    lines = [" ".join(tiny.WORDS[: 3 + index]) for index in range(8)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    text = {"calibration": {"source": str(tmp_path / "text.txt"), "samples": 8, "length": 64}}
    run(recipe(model, tmp_path / "a", **text), Options(), Silent())
    wanted = recipe(model, tmp_path / "b", **text)
    assert len(interrupt(wanted, after=2.5)) == 2
    resume(wanted)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_damaged_work_is_done_again(model: Path, straight: dict[str, str], tmp_path: Path) -> None:
    wanted = recipe(model, tmp_path / "out")
    interrupt(wanted)
    part = tmp_path / ".out.partial" / "parts" / "block-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    assert any("damaged" in message for message in resume(wanted))
    assert hashes(tmp_path / "out") == straight


def test_another_recipe_model_text_or_machine_is_refused(tmp_path: Path) -> None:
    """One interrupted run, several wrong ways to go on: each is refused, named, and costs nothing."""
    source = tiny.tiny_llama(tmp_path / "m", num_hidden_layers=3)
    text = tiny.write_text(tmp_path / "text.jsonl", 200)
    calibration = {"source": str(text), "samples": SAMPLES, "length": LENGTH}
    wanted = recipe(source, tmp_path / "out", calibration=calibration)
    kept = interrupt(wanted, after=2)
    assert kept

    def refused(changed: Recipe) -> set[str]:
        with pytest.raises(MismatchError) as caught:
            run(changed, Options(resume=True), Silent())
        assert finished(tmp_path / ".out.partial") == kept
        return {line.strip().split(": ")[0] for line in caught.value.message.splitlines()[1:]}

    assert refused(wanted.model_copy(update={"seed": 1})) == {"seed"}
    steps = [{"quantize": {"target": "int4", "damping": 0.02}}]
    damped = recipe(source, tmp_path / "out", calibration=calibration, steps=steps)
    assert refused(damped) == {"steps[0].quantize.damping"}
    fewer = recipe(source, tmp_path / "out", calibration=calibration | {"samples": SAMPLES - 1})
    assert refused(fewer) == {"calibration.samples", "calibration.windows.sha256"}
    torch.set_num_threads(2)
    assert refused(wanted) == {"threads"}
    torch.set_num_threads(1)
    before = text.read_bytes()
    tiny.write_text(text, 200, seed=1)
    assert refused(wanted) == {"calibration.windows.sha256"}
    text.write_bytes(before)
    weights = (source / "model.safetensors").read_bytes()
    tiny.tiny_llama(source, num_hidden_layers=3, seed=1)
    assert refused(wanted) == {"model.sha256"}
    (source / "model.safetensors").write_bytes(weights)
    listing = tmp_path / ".out.partial" / "journal.json"
    before = listing.read_bytes()
    elsewhere = {f"versions.{name}" for name in ("compress", "python", "torch", "transformers", "numpy", "scipy")}
    elsewhere |= {"device", "compute_dtype", "cpu.instruction_sets", "cpu.kernels"}
    content = json.loads(before)
    content["fingerprint"] |= dict.fromkeys(elsewhere, "another")
    del content["sha256"]
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    listing.write_text(json.dumps(content))
    assert refused(wanted) == elsewhere
    listing.write_bytes(before)
    # What no weight depends on may change: the memory, and what comes after the last block.
    loosened = recipe(
        source,
        tmp_path / "out",
        calibration=calibration | {"batch_size": 3},
        steps=[{"quantize": {"target": "int4", "max_fallback": 0.5, "max_shard_size": "1MB"}}],
        gates=["size <= 5MB"],
        report=["json"],
    )
    assert any("Resuming" in message for message in resume(loosened))


def test_a_mismatch_on_the_command_line(model: Path, tmp_path: Path) -> None:
    interrupt(recipe(model, tmp_path / "out"), after=2)
    changed = [*QUICK[:-3], str(SAMPLES + 1), *QUICK[-2:]]
    done = compress("quantize", model, *changed, "-o", tmp_path / "out", "--resume", OMP_NUM_THREADS="1")
    assert done.returncode == 7, done.stderr
    assert f"calibration.samples: the interrupted run had {SAMPLES}, this one has {SAMPLES + 1}" in done.stderr
    assert "leave out --resume" in done.stderr
    assert finished(tmp_path / ".out.partial")


FULL = {"a part or its state": ("Quantizing blocks", 3.2), "the checkpoint": ("write weights", 1.0)}


@pytest.mark.parametrize("place", FULL)
def test_a_disk_that_fills_up(
    place: str, model: Path, straight: dict[str, str], mounted: Callable[[str], Path]
) -> None:
    """Another program takes the last byte while we write; when it gives it back, the run goes on."""
    disk = mounted("12m")
    filler, wanted = disk / "filler", recipe(model, disk / "out")

    def fill() -> None:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)

    with pytest.raises(MissingResourceError, match=r"needs [\d,]+ bytes, [\d,]+ are free") as caught:
        run(wanted, Options(), Interrupting(*FULL[place], fill))
    assert str(disk) in caught.value.message
    assert any("--resume" in note for note in caught.value.__notes__)
    kept = finished(disk / ".out.partial")
    assert kept
    filler.unlink()
    assert any(f"Resuming after {len(kept)} finished" in message for message in resume(wanted))
    assert hashes(disk / "out") == straight
    assert [path.name for path in disk.iterdir()] == ["out"]


def test_a_disk_that_is_full_on_the_command_line(model: Path, mounted: Callable[[str], Path]) -> None:
    """Large enough for what the plan needs, and then filled by another program."""
    disk = mounted("12m")
    process = start(model, disk / "out")
    wait_for_blocks(disk / "out", 1, process)
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 9, err
    assert "the disk is full" in err
    assert "bytes" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert finished(disk / ".out.partial")


def test_the_plan_counts_the_states(model: Path, tmp_path: Path) -> None:
    plan = make_plan(recipe(model, tmp_path / "out"), open_checkpoint(model))
    interrupt(plan.recipe, after=2)
    (kept,) = (tmp_path / ".out.partial" / "state").iterdir()
    counted = state_bytes(plan, machine())
    assert STATE_SLOTS == 2
    assert kept.stat().st_size <= counted <= 1.1 * kept.stat().st_size
