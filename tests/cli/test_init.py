"""`compress init`: recipes that load and plan for every architecture, files that are new or not written at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from commandline import base_environment, compress
from contract import BUILDERS
from hub_stand_in import Hub, commit_of, serve
from ruamel.yaml import YAML

from compress.cli.app import start as command_line
from compress.cli.init import word
from compress.errors import CompressError, UsageError
from compress.model.architectures import ARCHITECTURES
from compress.model.checkpoint import open_checkpoint
from compress.plan.planning import Plan, make_plan
from compress.recipe.source import load_recipe
from compress.scheme import TARGETS
from compress.starter.start import Started, start
from compress.starter.workflow import Ci

WORKFLOW = Path(".github/workflows/compress.yml")


def model_of(kind: str, folder: Path, **changes: object) -> Path:
    made: Path = BUILDERS[kind](folder, **changes)  # type: ignore[call-arg]  # every builder takes config fields
    return made


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def began(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    model: str = "m",
    recipe: str = "compress.yaml",
    target: str | None = None,
    ci: Ci | None = "github",
) -> tuple[Started, Plan]:
    """Starts in `folder`, whose model is `m`, and plans what was written."""
    monkeypatch.chdir(folder)
    started = start(model, Path(recipe), target, ci)
    return started, make_plan(load_recipe(started.recipe), open_checkpoint(folder / "m"))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_recipe_fits_every_architecture(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of(kind, tmp_path / "m")
    started, plan = began(tmp_path, monkeypatch)
    answers = ARCHITECTURES[kind].kind
    assert plan.target.name == started.target == ("int4" if answers == "decoder" else "int8")
    assert plan.format_name == ("gptq" if kind == "gpt2" else "compressed-tensors")
    recipe = plan.recipe
    assert recipe.model == "./m"
    assert recipe.output == f"out/m-{plan.target.name}"
    assert set(recipe.report) == {"json", "md", "html", "junit"}
    assert (recipe.bench is None) == (recipe.evaluate is None) == (answers == "other")
    metrics = [gate.metric for gate in recipe.gates]
    wanted = {"decoder": ["kl.mean", "size"], "encoder": ["cosine.mean", "ndcg.drop", "size"], "other": ["size"]}
    assert metrics == wanted[answers]
    size = recipe.gates[-1]
    assert size.holds(plan.weight_bytes / 1e6)
    assert not size.holds(1.1 * plan.weight_bytes / 1e6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_every_target_works_or_is_refused_as_by_quantize(
    kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of(kind, tmp_path / "m")
    if kind == "gpt2" and target in ("int8", "fp8"):
        with pytest.raises(UsageError, match="cannot be written as compressed-tensors"):
            began(tmp_path, monkeypatch, target=target)
        assert names(tmp_path) == {f"m/{name}" for name in names(tmp_path / "m")}
        return
    assert began(tmp_path, monkeypatch, target=target)[1].target.name == target


def test_the_group_size_divides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for width, group in ((128, 128), (96, 32), (80, -1)):
        folder = tmp_path / str(width)
        folder.mkdir()
        tiny.tiny_llama(folder / "m", intermediate_size=width, hidden_size=width, head_dim=16)
        plan = began(folder, monkeypatch)[1]
        assert {scheme.group_size for scheme in plan.schemes.values()} == {group}


def test_a_model_with_room_answers_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.tiny_llama(tmp_path / "m", max_position_embeddings=2048)
    recipe = began(tmp_path, monkeypatch)[1].recipe
    assert recipe.evaluate is not None
    assert [task.name for task in recipe.evaluate.tasks] == ["next_sentence"]
    assert [(gate.metric, gate.level) for gate in recipe.gates][1] == ("accuracy.drop", 0.95)
    assert recipe.calibration.length == 512
    assert recipe.bench is not None
    assert recipe.bench.combinations == [(128, 48, 1)]


@pytest.mark.parametrize("positions", [4, 16, 100, 512])
def test_nothing_asked_is_longer_than_the_positions(
    positions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.tiny_llama(tmp_path / "m", max_position_embeddings=positions)
    recipe = began(tmp_path, monkeypatch)[1].recipe
    assert recipe.bench is not None
    assert recipe.evaluate is not None
    assert recipe.evaluate.generation is not None
    assert recipe.calibration.length <= positions
    assert recipe.bench.prompt[0] + recipe.bench.new_tokens[0] <= positions
    assert recipe.evaluate.generation.prompt + recipe.evaluate.generation.new_tokens <= positions


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_every_line_is_explained_and_every_alternative_works(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of(kind, tmp_path / "m", max_position_embeddings=512)
    began(tmp_path, monkeypatch)
    file = tmp_path / "compress.yaml"
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# yaml-language-server: $schema=./recipe.schema.json"
    assert json.loads((tmp_path / "recipe.schema.json").read_text())["$id"] == "urn:compress:recipe:1"
    assert all("  # " in line for line in lines if line and not line.startswith("#"))
    alternatives = [index for index, line in enumerate(lines) if re.match(r" +# (- |\w+: )", line)]
    assert len(alternatives) >= 5
    for index in alternatives:
        if "topics.jsonl" in lines[index]:
            continue  # a file of the user's
        changed = [*lines[:index], lines[index].replace("# ", "", 1), *lines[index + 1 :]]
        file.write_text("\n".join(changed), encoding="utf-8")
        make_plan(load_recipe(file), open_checkpoint(tmp_path / "m"))


def test_the_command_says_what_it_wrote_and_what_to_do_next(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    done = compress("init", "m", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[:3] == ["wrote compress.yaml", "wrote recipe.schema.json", f"wrote {WORKFLOW}"]
    assert lines[-3:] == ["next:", "  compress plan compress.yaml", "  compress run compress.yaml"]
    assert compress("plan", "compress.yaml", cwd=tmp_path).returncode == 0
    assert names(tmp_path) - {f"m/{name}" for name in names(tmp_path / "m")} == {
        "compress.yaml",
        "recipe.schema.json",
        str(WORKFLOW),
    }
    assert (tmp_path / "compress.yaml").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_as_json(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    done = compress("init", "m", "--json", "--ci", "gitlab", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert (answer["exit_code"], answer["error"], answer["output"]) == (0, None, None)
    assert answer["init"]["recipe"] == "compress.yaml"
    assert answer["init"]["workflow"] == ".gitlab/compress.yml"
    assert answer["init"]["written"] == ["compress.yaml", "recipe.schema.json", ".gitlab/compress.yml"]
    assert "include" in answer["init"]["to_do"][0]
    assert answer["init"]["next"] == ["compress plan compress.yaml", "compress run compress.yaml"]


@pytest.mark.parametrize("taken", ["compress.yaml", str(WORKFLOW)])
@pytest.mark.parametrize("form", ["file", "folder", "dangling link"])
def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path: Path, taken: str, form: str) -> None:
    tiny.tiny_llama(tmp_path / "m")
    path = tmp_path / taken
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "file":
        path.write_text("mine")
    elif form == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    before = names(tmp_path)
    done = compress("init", "m", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert taken in done.stderr
    assert "already there" in done.stderr
    assert names(tmp_path) == before
    assert not (tmp_path / "recipe.schema.json").exists()
    if form == "file":
        assert path.read_text() == "mine"


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.tiny_llama(tmp_path / "m")
    (tmp_path / ".github").write_text("a file where a folder must be")
    before = names(tmp_path)
    with pytest.raises(UsageError, match="not a folder"):
        began(tmp_path, monkeypatch)
    assert names(tmp_path) == before
    (tmp_path / ".github").unlink()
    real, calls = os.link, []

    def link(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 3:
            target.write_text("somebody else's")  # who was there in between
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UsageError, match="already there"):
        began(tmp_path, monkeypatch)
    assert names(tmp_path) == before - {".github"} | {str(WORKFLOW)}
    assert (tmp_path / WORKFLOW).read_text() == "somebody else's"


def test_a_schema_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.tiny_llama(tmp_path / "m")
    (tmp_path / "recipe.schema.json").write_text("mine")
    started, _ = began(tmp_path, monkeypatch)
    assert (tmp_path / "recipe.schema.json").read_text() == "mine"
    assert Path("recipe.schema.json") not in started.files


ODD = [
    "a b",
    "a'b",
    'a"b',
    "a: b",
    "a #b",
    "#a",
    "ü-😀",
    "${{ secrets.X }}",
    "a\nb: c",
    "a\x1b[31m",
    "$(x)",
    "no",
    "1e3",
]


@pytest.mark.parametrize("name", ODD)
def test_odd_names_are_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model's folder, and as the recipe's."""
    tiny.tiny_llama(tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    file = Path(name + " dir") / f"{name}.yaml"
    start(name, file, None, "github")
    recipe = load_recipe(file)
    assert recipe.model == f"./{name}"
    assert recipe.output == f"out/{name}-int4"
    workflow = YAML(typ="safe", pure=True).load(WORKFLOW.read_text(encoding="utf-8"))
    assert workflow["env"]["RECIPE"].replace("${{ '${{' }}", "${{") == file.as_posix()


@pytest.mark.parametrize("name", ODD)
def test_the_next_commands_can_be_pasted(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf %s {word(Path(name))}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert done.stdout.decode() == name
    assert word(Path(name)).isprintable()


BAD: list[tuple[list[str], int, str]] = [
    (["nowhere/at/all"], 9, "nowhere"),
    (["m", "--target", "int5"], 2, "int4"),
    (["m", "--ci", "jenkins"], 2, "github"),
    ([os.fsdecode(b"./bad\xff")], 2, "not valid Unicode"),
    (["m", "-o", "../out.yaml"], 2, "outside of this folder"),
    (["m", "-o", "m"], 2, "already there"),
    (["m", "-o", ""], 2, "already there"),
    (["m", "-o", "a" * 300], 2, "too long"),
    (["m", "-o", "a\0b"], 2, "null"),
    (["m", "-o", str(WORKFLOW)], 2, "the CI job goes there"),
    (["m", "-o", "m/config.json/recipe.yaml"], 2, "not a folder"),
]


def test_bad_names_and_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.tiny_llama(tmp_path / "m")
    (tmp_path / os.fsdecode(b"bad\xff")).symlink_to("m")
    monkeypatch.chdir(tmp_path)
    before = names(tmp_path)
    capfd.readouterr()
    for arguments, code, words in BAD:
        ended = command_line(["init", *arguments])
        shown = capfd.readouterr()
        assert (ended, shown.out) == (code, ""), (arguments, shown.err)
        assert words in shown.err, (arguments, shown.err)
        assert "Traceback" not in shown.err
        assert names(tmp_path) == before


def test_a_quantized_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.tiny_llama(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(CompressError, match="awq"):
        began(tmp_path, monkeypatch)
    assert not (tmp_path / "compress.yaml").exists()


def test_an_unknown_model_type_gets_a_recipe_that_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.tiny_llama(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"model_type": "frobnicator"}))
    plan = began(tmp_path, monkeypatch)[1]
    assert not plan.anatomy.known
    assert plan.algorithm == "rtn"


def test_the_job_starts_in_the_root_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    below = tmp_path / "below"
    tiny.tiny_llama(below / "m")
    with pytest.raises(UsageError, match="root of the repository") as caught:
        began(below, monkeypatch)
    assert f"{tmp_path}, and this is another folder" in caught.value.message
    assert began(below, monkeypatch, ci=None)[0].files == (Path("compress.yaml"), Path("recipe.schema.json"))
    monkeypatch.chdir(tmp_path)
    start("below/m", Path("below/other.yaml"), None, "github")
    assert '  RECIPE: "below/other.yaml"\n' in WORKFLOW.read_text()
    assert load_recipe("below/other.yaml").model == "./below/m"


def test_inside_the_model_the_output_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    monkeypatch.chdir(folder)
    start(".", Path("compress.yaml"), None, None)
    recipe = load_recipe("compress.yaml")
    assert (recipe.model, recipe.output) == (".", "../m-int4")


def test_absolute_models_become_relative_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = tmp_path / "here", tiny.tiny_llama(tmp_path / "elsewhere")
    tiny.tiny_llama(here / "m")
    assert began(here, monkeypatch, model=str(here / "m"))[1].recipe.model == "./m"
    started, plan = began(here, monkeypatch, model=str(elsewhere), recipe="b.yaml", ci="gitlab")
    assert plan.recipe.model == str(elsewhere)
    assert "outside of this folder" in started.notes[-1]


def test_a_hub_model_is_pinned_and_its_weights_stay_there(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    with serve(Hub({"org/tiny": {"main": folder}})) as hub:
        online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        for model, file in (("org/tiny", "a.yaml"), ("org/tiny@main", "b.yaml")):
            done = compress("init", model, "-o", file, "--ci", "none", cwd=tmp_path, **online)
            assert done.returncode == 0, done.stderr
        size = (folder / "model.safetensors").stat().st_size
        assert hub.sent("model.safetensors") < size
    pinned = load_recipe(tmp_path / "a.yaml")
    assert pinned.model == f"org/tiny@{commit_of('org/tiny', 'main')}"
    assert pinned.output == "out/tiny-int4"
    assert load_recipe(tmp_path / "b.yaml").model == "org/tiny@main"


def test_no_torch_is_needed(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    code = (
        "import sys; from compress.cli.app import start; code = start(['init', 'm', '--quiet']); "
        "print(code, sorted({'torch', 'transformers', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=base_environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
