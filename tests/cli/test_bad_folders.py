"""Folders whose files contradict each other: one clear message before torch is imported, with a way out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from commandline import base_environment, compress, hashes
from safetensors.torch import load_file, save_file
from test_bad_input import check_refused

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def shards(folder: Path) -> Path:
    """Splits a tiny model into files of one tensor or a few."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40kB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def change_map(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def places(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def another(folder: Path, name: str) -> str:
    """A shard that does not hold the tensor."""
    held = places(folder)
    return next(shard for shard in sorted(held.values()) if shard != held[name])


def names_what_the_shard_lacks(folder: Path) -> list[str]:
    other = another(folder, NORM)
    change_map(folder, lambda held: held.update({NORM: other}))
    return [f"{INDEX} says that {other} holds tensor {NORM}; it does not"]


def names_a_tensor_that_is_nowhere(folder: Path) -> list[str]:
    other = another(folder, NORM)
    change_map(folder, lambda held: held.update({"model.ghost.weight": other}))
    return [f"says that {other} holds tensor model.ghost.weight; it does not"]


def names_a_missing_shard(folder: Path) -> list[str]:
    lost = sorted(set(places(folder).values()))[1:3]
    for shard in lost:
        (folder / shard).unlink()
    return [f"{shard} is missing, though {INDEX} names it" for shard in lost]


def names_a_file_outside(folder: Path) -> list[str]:
    save_file({NORM: torch.ones(64)}, folder.parent / "other.safetensors")
    change_map(folder, lambda held: held.update({NORM: "../other.safetensors"}))
    return ["names files that are no plain *.safetensors names: '../other.safetensors'"]


def names_an_absolute_file(folder: Path) -> list[str]:
    path = folder.parent / "other.safetensors"
    save_file({NORM: torch.ones(64)}, path)
    change_map(folder, lambda held: held.update({NORM: str(path)}))
    return [f"names files that are no plain *.safetensors names: '{path}'"]


def names_no_files(folder: Path) -> list[str]:
    change_map(folder, lambda held: held.update({NORM: 7}))
    return ["has no weight_map from tensor names to file names"]


def has_a_tensor_twice(folder: Path) -> list[str]:
    other, held = another(folder, NORM), places(folder)[NORM]
    save_file(load_file(folder / other) | {NORM: torch.ones(64)}, folder / other, metadata={"format": "pt"})
    return [f"tensor {NORM} is stored more than once: in {', '.join(sorted((held, other)))}"]


@pytest.mark.parametrize(
    "lie",
    [
        names_what_the_shard_lacks,
        names_a_tensor_that_is_nowhere,
        names_a_missing_shard,
        names_a_file_outside,
        names_an_absolute_file,
        names_no_files,
        has_a_tensor_twice,
    ],
    ids=lambda function: function.__name__,
)
def test_an_index_that_lies(lie: Callable[[Path], list[str]], tmp_path: Path) -> None:
    words = lie(shards(tiny.tiny_llama(tmp_path / "m")))
    before = hashes(tmp_path)
    done = without_torch("quantize", tmp_path / "m", "--target", "int4", "-o", tmp_path / "out")
    check_refused(done, 2, *words, "hint: fetch or save the model again")
    assert hashes(tmp_path) == before


@pytest.mark.parametrize(
    ("dtype", "stored", "names"),
    [
        (torch.float8_e4m3fn, "F8_E4M3", ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]),
        (torch.int8, "I8", ["model.layers.1.self_attn.q_proj.weight"]),
        (torch.float8_e5m2, "F8_E5M2", ["model.embed_tokens.weight"]),
    ],
    ids=str,
)
def test_weights_that_another_tool_has_rounded(
    dtype: torch.dtype, stored: str, names: list[str], tmp_path: Path
) -> None:
    path = tiny.tiny_llama(tmp_path / "m") / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(dtype) for name in names}, path, metadata={"format": "pt"})
    done = without_torch("quantize", tmp_path / "m", "--target", "int8", "-o", tmp_path / "out")
    check_refused(
        done,
        2,
        f"{len(names)} tensors are stored as {stored}; weights are read as F64, F32, F16 or BF16",
        *(f"{name}: {stored}" for name in names),
        "hint: Start from the original model, or convert this one to bfloat16",
    )
    assert [one.name for one in tmp_path.iterdir()] == ["m"]


def test_a_head_that_is_tied_and_is_not(tmp_path: Path) -> None:
    """Stock loading would keep the one or the other, depending on its version."""
    path = tiny.tiny_llama(tmp_path / "m", tie_word_embeddings=True) / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path, metadata={"format": "pt"})
    done = compress("quantize", tmp_path / "m", "--target", "int8", "--no-evaluate", "--no-bench", "-o", tmp_path / "o")
    check_refused(
        done,
        2,
        "lm_head.weight: tied to model.embed_tokens.weight by config.json (tie_word_embeddings), but the file holds "
        "other values; set tie_word_embeddings to false to keep both, or remove lm_head.weight",
    )
    assert [one.name for one in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--target", "int4", "--no-evaluate"), 2),
        (("--target", "int4", "--algorithm", "rtn"), 2),
        (("--target", "int4", "--algorithm", "rtn", "--no-evaluate"), 0),
    ],
    ids=["calibration needs it", "evaluation needs it", "rounding does not"],
)
def test_a_tokenizer_that_does_not_load(options: tuple[str, ...], code: int, tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{broken")
    done = compress(
        "quantize", folder, *options, "--no-bench", "--samples", "2", "--length", "32", "-o", tmp_path / "o"
    )
    if code:
        check_refused(done, code, f"the tokenizer in {folder} cannot be loaded (", "hint: save it again")
        assert [one.name for one in tmp_path.iterdir()] == ["m"]
    else:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "o" / "tokenizer.json").read_text() == "{broken"


def without_torch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`compress ARGUMENTS` in a process that cannot import torch: what is refused here is refused at once."""
    code = "import sys; sys.modules['torch'] = None; from compress.__main__ import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=base_environment(),
        check=False,
        timeout=600,
    )
