"""Every bad input of the product: one clear message, the right exit code, nothing written, inputs untouched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from commandline import base_environment, compress, hashes

QUICK = ("--target", "int4", "--no-bench", "--samples", "4", "--length", "64", "--evaluation-tokens", "256")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.tiny_llama(tmp_path / "m")


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def pickled_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def garbage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "frobnicator"}))


def nan_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def nan_norm(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def overflow(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][3] = 1e20
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BROKEN_MODELS: list[tuple[Callable[[Path], None], int, str]] = [
    (drop_config, 2, "config.json"),
    (pickled_only, 2, "pickle"),
    (truncate, 2, "bytes"),
    (garbage_header, 2, "model.safetensors"),
    (unknown_type, 2, "frobnicator"),
    (nan_weights, 10, "model.layers.1.mlp.up_proj"),
    (nan_norm, 10, "model.norm.weight"),
    (overflow, 10, "not finite"),
]


def check_refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize(("breakage", "code", "word"), BROKEN_MODELS, ids=[row[0].__name__ for row in BROKEN_MODELS])
def test_broken_models(breakage: Callable[[Path], None], code: int, word: str, model: Path, tmp_path: Path) -> None:
    breakage(model)
    before = hashes(model)
    done = compress("quantize", model, *QUICK, "-o", tmp_path / "deep" / "out")
    check_refused(done, code, word)
    assert hashes(model) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_model_that_does_not_exist_or_is_a_file(tmp_path: Path) -> None:
    check_refused(compress("quantize", tmp_path / "none", *QUICK), 9, "none")
    (tmp_path / "file").write_text("x")
    check_refused(compress("quantize", tmp_path / "file", *QUICK), 2, "file")


def test_hub_id_while_offline(tmp_path: Path) -> None:
    done = compress("quantize", "someone/some-model", *QUICK, cwd=tmp_path, HF_HOME=str(tmp_path / "hf"))
    check_refused(done, 9, "someone/some-model", "hint: ")


@pytest.mark.parametrize("size", ["0", "-5", "sixty", "1.5"])
def test_group_sizes_that_cannot_be(size: str, model: Path, tmp_path: Path) -> None:
    """H01, third case."""
    check_refused(compress("quantize", model, *QUICK, "--group-size", size, cwd=tmp_path), 2, "--group-size")


def test_group_size_is_checked_before_any_weight_is_loaded(tmp_path: Path) -> None:
    """H01: both layers named, nothing written, torch never imported."""
    folder = tiny.tiny_llama(tmp_path / "m", intermediate_size=96)
    code = (
        "import sys\nfrom compress.cli.app import app\n"
        f"sys.argv = ['compress', 'quantize', {str(folder)!r}, '--target', 'int4', '--group-size', '64']\n"
        "try:\n    app()\nfinally:\n    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=base_environment(),
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == "False\n"
    assert "model.layers.0.mlp.down_proj" in done.stderr
    assert "model.layers.1.mlp.down_proj" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("content", ["", "\n\n  \n", '{"content": "no text"}\n', "not json\n", '{"text": 3}\n'])
def test_calibration_text_that_is_none(content: str, model: Path, tmp_path: Path) -> None:
    """H09, the empty cases."""
    path = tmp_path / "text.jsonl"
    path.write_text(content)
    done = compress("quantize", model, *QUICK, "--calibration", path, "-o", tmp_path / "out")
    check_refused(done, 2, "text.jsonl")
    assert not (tmp_path / "out").exists()


def test_calibration_text_that_is_missing_or_unreadable(model: Path, tmp_path: Path) -> None:
    check_refused(compress("quantize", model, *QUICK, "--calibration", tmp_path / "none.txt"), 9, "none.txt")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    check_refused(compress("quantize", model, *QUICK, "--calibration", tmp_path / "latin.txt"), 2, "UTF-8")


def test_overlapping_texts(model: Path, tmp_path: Path) -> None:
    tiny.write_text(tmp_path / "a.jsonl", 40)
    tiny.write_text(tmp_path / "b.jsonl", 10)
    done = compress(
        "quantize", model, *QUICK, "--calibration", tmp_path / "a.jsonl", "--evaluation", tmp_path / "b.jsonl"
    )
    check_refused(done, 2, "a.jsonl", "b.jsonl")


@pytest.mark.parametrize("spelling", ["m", "m/../m", "link", "m/out", "file"])
def test_output_that_is_the_input(spelling: str, model: Path, tmp_path: Path) -> None:
    """H13."""
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "file").write_text("x")
    before = hashes(tmp_path)
    done = compress("quantize", "m", *QUICK, "-o", spelling, "--overwrite", cwd=tmp_path)
    check_refused(done, 2, spelling)
    assert hashes(tmp_path) == before


def test_overwrite_on_a_home_folder(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("secret")
    done = compress("quantize", model, *QUICK, "-o", home, "--overwrite", HOME=str(home))
    check_refused(done, 2, "refusing to overwrite")
    assert (home / ".ssh" / "id").read_text() == "secret"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_parent(model: Path, tmp_path: Path) -> None:
    parent = tmp_path / "locked"
    parent.mkdir(mode=0o500)
    check_refused(compress("quantize", model, *QUICK, "-o", parent / "out"), 2, "not writable")


def test_disk_that_is_too_small(model: Path, small_disk: Path) -> None:
    check_refused(compress("quantize", model, *QUICK, "-o", small_disk / "out"), 9, "MB")
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_before_the_first_block(number: signal.Signals, model: Path, tmp_path: Path) -> None:
    before = hashes(model)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "compress",
            "quantize",
            str(model),
            "--target",
            "int4",
            "--no-bench",
            "-o",
            str(tmp_path / "x" / "out"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=base_environment(),
    )
    stage = tmp_path / "x" / ".out.partial" / "stage"  # made long before the first block is finished
    deadline = time.monotonic() + 120
    while not stage.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert hashes(model) == before


def test_killed_and_run_again(model: Path, tmp_path: Path) -> None:
    """kill -9 leaves `.out.partial`; the next run clears it and ends as if nothing had been."""
    leftover = tmp_path / ".out.partial" / "stage"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    (leftover.parent / ".compress-run").touch()
    done = compress("quantize", model, *QUICK, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]


def test_json_errors_are_one_object_on_stdout(tmp_path: Path) -> None:
    done = compress("quantize", tmp_path / "none", *QUICK, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == answer["exit_code"] == 9
    assert "none" in answer["error"]["message"]
    assert set(answer) >= {"output", "report", "verdict", "exit_code", "measurements", "error"}


@pytest.mark.parametrize(
    "arguments", [("quantize",), ("quantize", "m", "--target", "int5"), ("run",), ("run", "none.yaml"), ("frobnicate",)]
)
def test_usage_errors(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = compress(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_verbose_shows_where_an_error_came_from(tmp_path: Path) -> None:
    assert "Traceback" in compress("quantize", tmp_path / "none", *QUICK, "-v").stderr
