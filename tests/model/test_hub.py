from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from hub_stand_in import Hub, commit_of, serve
from tiny import tiny_llama

from compress.errors import EXIT_MISSING_RESOURCE, EXIT_USAGE, MissingResourceError, UsageError
from compress.model.checkpoint import open_checkpoint
from compress.model.hub import is_local, resolve
from compress.model.sidefiles import side_files

# huggingface_hub reads its endpoint when it is imported, so every question is asked in a fresh process.
ASK = """
import json, sys
from compress.errors import CompressError
from compress.model.hub import resolve
model, options = sys.argv[1], json.loads(sys.argv[2])
try:
    checkpoint = resolve(model, **options)
except CompressError as error:
    answer = {"exit": error.exit_code, "message": error.message, "hint": error.hint}
else:
    answer = {
        "folder": str(checkpoint.folder), "revision": checkpoint.revision, "source": checkpoint.source,
        "has_weights": checkpoint.has_weights, "weight_bytes": checkpoint.weight_bytes,
        "model_type": checkpoint.model_type,
        "tensors": {t.name: [t.dtype, list(t.shape), t.shard] for t in checkpoint.tensors.values()},
    }
assert "torch" not in sys.modules
print(json.dumps(answer))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with every kind of file: one that is copied, and ones that are not to be fetched."""
    folder = tiny_llama(tmp_path / "llama")
    for name in ("LICENSE", "README.md", "modeling_x.py", "pytorch_model.bin", "consolidated.safetensors"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Iterator[Hub]:
    small = tiny_llama(tmp_path / "small", num_hidden_layers=1)
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    (pickled / "model.safetensors").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "README.md").write_text("nothing else")
    sharded = tmp_path / "sharded"
    transformers.LlamaForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="150KB")
    repositories = {
        "org/llama": {"main": folder, "small": small},
        "org/gated": {"main": folder},
        "org/pickled": {"main": pickled},
        "org/empty": {"main": empty},
        "org/sharded": {"main": sharded},
    }
    with serve(Hub(repositories, gated=frozenset({"org/gated"}))) as hub:
        yield hub


def ask(model: str, endpoint: str, home: Path, env: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint} | (env or {})
    result = subprocess.run(
        [sys.executable, "-c", ASK, model, json.dumps(options)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def described(folder: Path) -> dict[str, list[Any]]:
    return {t.name: [t.dtype, list(t.shape), t.shard] for t in open_checkpoint(folder).tensors.values()}


@pytest.mark.parametrize("name", ["org/llama", "org/sharded"])
def test_plan_reads_headers_and_no_weights(hub: Hub, home: Path, name: str) -> None:
    folder = hub.repositories[name]["main"]
    answer = ask(name, hub.endpoint, home, weights=False)
    assert answer["tensors"] == described(folder)
    assert answer["weight_bytes"] == open_checkpoint(folder).weight_bytes
    assert answer["model_type"] == "llama"
    assert answer["revision"] == commit_of(name, "main")
    assert answer["source"] == name
    assert not answer["has_weights"]
    for file in open_checkpoint(folder).shard_bytes:
        # huggingface_hub asks for the first 100 kB, which is less than the file and more than its header
        assert 0 < hub.sent(file) <= 100_001
        assert not (Path(answer["folder"]) / file).exists()
    whole = hub.sent("model.safetensors")
    assert whole < (folder / "model.safetensors").stat().st_size if name == "org/llama" else whole == 0


def test_download_fetches_what_is_used_and_nothing_else(hub: Hub, home: Path, folder: Path) -> None:
    answer = ask("org/llama", hub.endpoint, home, weights=True)
    assert answer["has_weights"]
    assert answer["revision"] == commit_of("org/llama", "main")
    snapshot = Path(answer["folder"])
    wanted = {Path("config.json"), Path("model.safetensors"), *side_files(folder)}
    assert {path.relative_to(snapshot) for path in snapshot.rglob("*")} == wanted
    for name in wanted:
        assert (snapshot / name).read_bytes() == (folder / name).read_bytes()
    assert side_files(snapshot) == side_files(folder)
    assert hub.sent("pytorch_model.bin") == hub.sent("consolidated.safetensors") == hub.sent("modeling_x.py") == 0
    assert open_checkpoint(snapshot).content_hash == open_checkpoint(folder).content_hash


def test_code_is_fetched_only_with_trust(hub: Hub, home: Path) -> None:
    answer = ask("org/llama", hub.endpoint, home, weights=True, trust_remote_code=True)
    assert (Path(answer["folder"]) / "modeling_x.py").exists()


@pytest.mark.parametrize("revision", ["small", commit_of("org/llama", "small")])
def test_a_revision_is_a_branch_or_a_commit(hub: Hub, home: Path, revision: str) -> None:
    answer = ask(f"org/llama@{revision}", hub.endpoint, home, weights=True)
    assert answer["revision"] == commit_of("org/llama", "small")
    assert answer["tensors"] == described(hub.repositories["org/llama"]["small"])


@pytest.mark.parametrize(
    ("model", "exit_code", "message", "hint"),
    [
        ("org/gated", EXIT_MISSING_RESOURCE, "is gated", "hf auth login"),
        ("org/absent", EXIT_MISSING_RESOURCE, "no folder org/absent here and no model", "spelling"),
        ("org/llama@v9", EXIT_MISSING_RESOURCE, "no revision 'v9'", "branch"),
        ("org/llama@", EXIT_MISSING_RESOURCE, "no revision after the @", "org/name@revision"),
        ("or g/llama", EXIT_MISSING_RESOURCE, "neither a folder here nor a hub id", "./"),
        ("org/pickled", EXIT_USAGE, "only pickled weights (pytorch_model.bin)", "save_pretrained"),
        ("org/empty", EXIT_USAGE, "has no config.json", "transformers"),
    ],
)
@pytest.mark.parametrize("weights", [False, True])
def test_errors_name_the_way_out(
    hub: Hub, home: Path, model: str, exit_code: int, message: str, hint: str, weights: bool
) -> None:
    answer = ask(model, hub.endpoint, home, weights=weights)
    assert answer["exit"] == exit_code
    assert message in answer["message"]
    assert hint in answer["hint"]
    assert "\n" not in answer["message"]


def test_what_is_cached_works_without_a_connection(hub: Hub, home: Path) -> None:
    plan = ask("org/llama", hub.endpoint, home, weights=False)
    offline = {"HF_HUB_OFFLINE": "1"}
    partly = ask("org/llama", hub.endpoint, home, offline, weights=True)
    assert partly["exit"] == EXIT_MISSING_RESOURCE
    assert "only a part" in partly["message"]
    full = ask("org/llama", hub.endpoint, home, weights=True)
    asked = len(hub.answers)
    closed = "http://127.0.0.1:1"
    for weights in (False, True):
        assert ask("org/llama", hub.endpoint, home, offline, weights=weights) == full
        assert ask("org/llama", closed, home, weights=weights) == full
    assert len(hub.answers) == asked
    assert full["revision"] == plan["revision"]


@pytest.mark.parametrize(("endpoint", "env"), [("http://127.0.0.1:1", {}), ("", {"HF_HUB_OFFLINE": "1"})])
def test_nothing_cached_and_no_connection(home: Path, endpoint: str, env: dict[str, str]) -> None:
    answer = ask("org/llama", endpoint or "http://127.0.0.1:1", home, env, weights=False)
    assert answer["exit"] == EXIT_MISSING_RESOURCE
    assert "not in the cache" in answer["message"]
    assert "connected machine" in answer["hint"]
    assert "HF_HOME" in answer["hint"]


def test_folders_come_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for model in ("llama", "./llama", str(folder)):
        checkpoint = resolve(model, weights=True)
        assert checkpoint.source == model
        assert checkpoint.revision is None
        assert checkpoint.folder.resolve() == folder
    with pytest.raises(UsageError, match="is a file"):
        resolve("llama/config.json", weights=False)
    for missing in ("./nowhere", "out/of/sight", "~/nowhere-at-all", "..\\model"):
        with pytest.raises(MissingResourceError, match="does not exist"):
            resolve(missing, weights=False)


@pytest.mark.parametrize("model", ["gpt2", "org/name", "org/name@refs/pr/1", "org/name@main"])
def test_hub_ids_are_not_paths(model: str) -> None:
    assert not is_local(model)


@pytest.mark.parametrize(
    "model", ["~nobody-of-this-name/x", "./" + "x" * 300, "/x\0y", "a/" * 2000, "x" * 300, "org/x\0y"]
)
def test_a_model_that_no_path_can_name_is_a_missing_resource(model: str) -> None:
    with pytest.raises(MissingResourceError) as caught:
        resolve(model, weights=False)
    assert caught.value.exit_code == EXIT_MISSING_RESOURCE
