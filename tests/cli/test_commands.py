"""What each command says and how it ends: exit code, stdout, stderr."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny
from commandline import ROOT, compress

COMMANDS = ("quantize", "run", "plan", "eval", "bench", "init", "report", "compare", "schema", "doctor")


def write_recipe(folder: Path, **changes: object) -> Path:
    recipe = {"version": 1, "model": str(folder / "m"), "steps": [{"quantize": {"target": "int4"}}]} | changes
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def test_help_names_every_command_and_exit_code() -> None:
    done = compress("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert command in done.stdout
    assert "130 interrupted" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str) -> None:
    done = compress(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")


def test_version() -> None:
    assert compress("--version").stdout.startswith("compress 0.")


def test_plan_shows_layers_bytes_and_what_is_left_alone(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    done = compress("plan", write_recipe(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in ("model.layers.{0..1}.mlp.down_proj", "W4A16 g64", "embedding, protected", "model.safetensors"):
        assert words in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "recipe.yaml"]


def test_plan_as_json(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    done = compress("plan", write_recipe(tmp_path), "--json")
    plan = json.loads(done.stdout)["plan"]
    assert len(plan["layers"]) == 14
    assert plan["layers"][0] == {
        "name": "model.layers.0.self_attn.q_proj",
        "shape": [64, 64],
        "scheme": "W4A16 g64",
        "skipped": None,
    }
    assert plan["weight_bytes_after"] == sum(plan["files"].values())
    assert plan["estimate"]["memory_bytes"] > 0


def test_a_bad_recipe_says_all_at_once_and_imports_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "version: 1\nmodel: ./m\nquantise: 1\nsteps:\n  - quantize: {target: int4, group_sise: 64}\n"
        "gates:\n  - kl.maen <= 0.1\n  - size <= 100\n"
    )
    for command in ("plan", "run"):
        done = compress(command, path)
        assert done.returncode == 2
        assert done.stdout == ""
        for words in ("bad.yaml:3:1", "bad.yaml:5:", "group_size", "bad.yaml:7:", "kl.mean", "bad.yaml:8:", "MB"):
            assert words in done.stderr, done.stderr


def test_schema_is_the_file_beside_the_recipes() -> None:
    done = compress("schema")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads((ROOT / "recipes" / "recipe.schema.json").read_text())


def test_doctor() -> None:
    done = compress("doctor")
    assert done.returncode == 0
    for words in ("torch", "transformers", "compressed-tensors", "CPU", "int4"):
        assert words in done.stdout
    answer = json.loads(compress("doctor", "--json").stdout)
    assert {row["target"] for row in answer["doctor"]["targets"]} >= {"int4", "int8", "bf16"}


def test_run_from_a_recipe_under_a_plain_locale(tmp_path: Path) -> None:
    """H18: a Chinese comment and output path under LC_ALL=C."""
    tiny.tiny_llama(tmp_path / "m")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"# 模型压缩\nversion: 1\nmodel: {tmp_path}/m\noutput: {tmp_path}/输出\n"
        "calibration: {samples: 4, length: 64}\nsteps:\n  - quantize: {target: int4}\n"
        "evaluate: {fidelity: {tokens: 256, length: 64}}\ngates: [kl.mean <= 5]\n",
        encoding="utf-8",
    )
    done = compress("run", path, LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "输出" / "compress.json").is_file()


def test_a_path_that_the_locale_cannot_spell(tmp_path: Path) -> None:
    """Python's UTF-8 mode is on under LC_ALL=C; whoever turns it off gets the reason and not a traceback."""
    tiny.tiny_llama(tmp_path / "m")
    path = write_recipe(tmp_path, output=f"{tmp_path}/输出")
    done = compress("run", path, LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 2
    assert "PYTHONUTF8=1" in done.stderr


def sample(name: str) -> Path:
    """A sample model from the cache; the test scripts fetch it before the tests run."""
    import platformdirs

    cache = Path(os.environ.get("COMPRESS_CACHE") or platformdirs.user_cache_dir("compress"))
    folder = cache / "samples" / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not in the cache: `python scripts/fetch_samples.py {name}` could not fetch it")
    return folder


@pytest.fixture
def with_samples(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("smollm2-135m-instruct", "all-minilm-l6-v2"):
        (tmp_path / "models" / name).symlink_to(sample(name))
    return tmp_path


@pytest.mark.sample
@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_plans_on_its_sample(recipe: Path, with_samples: Path) -> None:
    done = compress("plan", recipe, cwd=with_samples)
    assert done.returncode == 0, done.stderr


@pytest.mark.sample
@pytest.mark.parametrize(
    "recipe",
    [
        "minilm-int8",
        "smollm2-int8-weight",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("smollm2-int4", "smollm2-int8", "smollm2-gptq-format")
        ),
    ],
)
def test_recipes_end_green_with_room_in_their_gates(recipe: str, with_samples: Path) -> None:
    """At least 30 % between every measured value and its gate; no gate names a time."""
    done = compress("run", ROOT / "recipes" / f"{recipe}.yaml", "--json", cwd=with_samples)
    assert done.returncode == 0, done.stderr
    for gate in json.loads(done.stdout)["verdict"]["gates"]:
        assert not gate["metric"].startswith("latency")
        value, threshold = gate["value"], gate["threshold"]
        if gate["metric"].startswith("cosine"):
            assert 1 - value <= 0.7 * (1 - threshold)
        else:
            assert value <= threshold / 1.3


@pytest.mark.sample
def test_minilm_result_loads_in_place_of_the_original(with_samples: Path) -> None:
    """H12: what sentence-transformers needs is in the folder, byte-equal."""
    source, output = with_samples / "models" / "all-minilm-l6-v2", with_samples / "out"
    done = compress("quantize", source, "--target", "int8", "--no-bench", "--no-evaluate", "-o", output)
    assert done.returncode == 0, done.stderr
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "tokenizer.json"):
        assert (output / name).read_bytes() == (source / name).read_bytes()
    assert (output / "README.original.md").read_bytes() == (source / "README.md").read_bytes()
