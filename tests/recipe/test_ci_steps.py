"""The CI files of `recipes/ci/`: their rights, their pins, and their shell, which is run here on a tiny model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
from commandline import ROOT, base_environment
from ruamel.yaml import YAML

from compress.starter.workflow import workflow_text

NAME = 'recipe $(touch stolen) "a" #1.yaml'
"""Of the recipe: a shell that does not quote it would make a file `stolen`."""
REPORTS = {"report.json", "report.md", "report.html", "junit.xml", "run.json", "plan.json", "plan.txt"}
GATES = {"PASS": ("size <= 10MB", 0), "FAIL": ("size <= 0.001MB", 3)}


def read(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def github() -> Any:
    return read((ROOT / "recipes" / "ci" / "github-actions.yml").read_text(encoding="utf-8"))


def gitlab() -> Any:
    return read((ROOT / "recipes" / "ci" / "gitlab-ci.yml").read_text(encoding="utf-8"))["compress"]


@dataclass(frozen=True)
class Place:
    """A checkout with a model, a recipe and the commands that a CI machine has."""

    folder: Path

    def bash(self, script: str, **environment: str) -> int:
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=base_environment() | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"} | environment,
            check=False,
            timeout=600,
        )
        return done.returncode

    def command(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def found(self) -> set[str]:
        report = self.folder / "compress-report"
        return {path.name for path in report.iterdir()} if report.is_dir() else set()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    python = shlex.quote(sys.executable)
    made.command("python", f'exec {python} "$@"')
    made.command("compress", f'exec {python} -m compress "$@"')
    return made


def write_recipe(place: Place, gate: str) -> None:
    tiny.tiny_llama(place.folder / "m")
    recipe = {
        "version": 1,
        "model": "./m",
        "output": "out/a b",
        "calibration": {"samples": 2, "length": 32},
        "steps": [{"quantize": {"target": "int8-weight"}}],
        "evaluate": {"fidelity": {"tokens": 128, "length": 32}, "generation": None},
        "gates": [gate],
    }
    (place.folder / NAME).write_text(json.dumps(recipe))


def run_github(place: Place) -> int:
    """The steps of the job `compress`, but for the installation, as GitHub runs them; returns the first bad code."""
    text = read(workflow_text("github", NAME, ""))
    names = {key: value for key, value in text["env"].items() if "${{" not in value}
    summary = place.folder / "summary.md"
    code = 0
    for step in text["jobs"]["compress"]["steps"]:
        if "run" not in step or step["name"] == "Install":
            continue
        assert step.get("if") in (None, "always()")
        if code and "if" not in step:
            continue
        code = place.bash(step["run"], GITHUB_STEP_SUMMARY=str(summary), **names) or code
    return code


def run_gitlab(place: Place) -> int:
    job = read(workflow_text("gitlab", NAME, ""))["compress"]
    names = {"RECIPE": job["variables"]["RECIPE"]["value"], "COLUMNS": job["variables"]["COLUMNS"]}
    code = place.bash("\n".join(job["script"]), **names)
    assert place.bash("\n".join(job["after_script"]), **names) == 0
    return code


@pytest.mark.parametrize("outcome", GATES)
def test_github_runs_and_publishes(place: Place, outcome: str) -> None:
    gate, code = GATES[outcome]
    write_recipe(place, gate)
    assert run_github(place) == code
    assert place.found() >= REPORTS
    assert json.loads((place.folder / "compress-report" / "run.json").read_text())["exit_code"] == code
    summary = (place.folder / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith("<details><summary>Plan</summary>\n\n    ")
    assert (place.folder / "compress-report" / "report.md").read_text(encoding="utf-8") in summary
    assert outcome in summary
    assert not (place.folder / "stolen").exists()


@pytest.mark.parametrize("outcome", [pytest.param("PASS", marks=pytest.mark.slow), "FAIL"])
def test_gitlab_runs_and_publishes(place: Place, outcome: str) -> None:
    gate, code = GATES[outcome]
    write_recipe(place, gate)
    assert run_gitlab(place) == code
    assert place.found() >= REPORTS
    assert gitlab()["artifacts"]["reports"]["junit"] == "compress-report/junit.xml"
    assert not (place.folder / "stolen").exists()


@pytest.mark.parametrize("job", [run_github, run_gitlab])
def test_a_wrong_recipe_ends_at_the_plan(place: Place, job: Any) -> None:
    write_recipe(place, "size <= 10")
    assert job(place) == 2
    assert "run.json" not in place.found()
    if job is run_github:
        assert "before it had a report" in (place.folder / "summary.md").read_text()


def test_the_installation_says_what_is_missing_and_installs_nothing_else(place: Place) -> None:
    place.command("python", 'echo "$*" >> installed')
    install = next(step["run"] for step in github()["jobs"]["compress"]["steps"] if step.get("name") == "Install")
    for script in (install, "\n".join(gitlab()["before_script"])):
        (place.folder / "installed").unlink(missing_ok=True)
        assert place.bash(script, COMPRESS_PACKAGE="") == 2
        assert not (place.folder / "installed").exists()
        assert place.bash(script, COMPRESS_PACKAGE="a b") == 0
        assert (place.folder / "installed").read_text().splitlines()[1:] == ["-m pip install a b"]


COMMENT = "<!-- compress-report -->\n# PASS\n"
STAND_IN = """case "$*" in
  *--paginate*) cat existing ;;
  *) printf '%s\\n' "$*" >> calls ;;
esac"""


@pytest.mark.parametrize(
    ("existing", "call"),
    [
        ("", "--method POST repos/o/n/issues/7/comments"),
        ("41\n42\n", "--method PATCH repos/o/n/issues/comments/41"),
    ],
)
def test_one_comment_is_kept_up_to_date(place: Place, existing: str, call: str) -> None:
    """`gh` is a stand-in that lists the ids in `existing` and records every other call."""
    place.command("gh", STAND_IN)
    (place.folder / "existing").write_text(existing)
    (place.folder / "compress-report").mkdir()
    script = github()["jobs"]["comment"]["steps"][-1]["run"]
    environment = {"GITHUB_REPOSITORY": "o/n", "PULL_REQUEST": "7"}
    assert place.bash(script, **environment) == 0
    assert not (place.folder / "calls").exists(), "there is no report to show"
    (place.folder / "compress-report" / "report.md").write_text(COMMENT)
    assert place.bash(script, **environment) == 0
    assert (place.folder / "calls").read_text() == f"api --silent {call} -F body=@compress-report/report.md\n"
    assert f'startswith("{COMMENT.splitlines()[0]}")' in script


def test_github_may_only_read_and_only_the_comment_may_write() -> None:
    workflow = github()
    assert workflow["on"] == "pull_request"
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert "permissions" not in jobs["compress"]
    assert jobs["comment"]["permissions"] == {"pull-requests": "write"}
    assert "vars.COMPRESS_COMMENT == 'true'" in jobs["comment"]["if"]
    assert "head.repo.full_name == github.repository" in jobs["comment"]["if"]
    used = [step["uses"].partition("@")[0] for step in jobs["comment"]["steps"] if "uses" in step]
    assert used == ["actions/download-artifact"], "no checkout: nothing of the pull request is run with this right"
    assert jobs["compress"]["steps"][0]["with"]["persist-credentials"] is False
    assert "secrets." not in (ROOT / "recipes" / "ci" / "github-actions.yml").read_text(encoding="utf-8")


def test_actions_are_pinned_to_commits_with_their_version_beside() -> None:
    lines = (ROOT / "recipes" / "ci" / "github-actions.yml").read_text(encoding="utf-8").splitlines()
    uses = [line for line in lines if "uses:" in line]
    assert len(uses) == 5
    for line in uses:
        assert re.search(r"uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_nothing_from_outside_is_pasted_into_a_shell() -> None:
    for job in github()["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")
    scripts = [line for key in ("before_script", "script", "after_script") for line in gitlab()[key]]
    for word in re.findall(r"\$\{?CI_\w+", "\n".join(scripts)):
        pytest.fail(f"{word} in a script")


def test_what_is_published_is_published_whatever_the_outcome() -> None:
    upload = github()["jobs"]["compress"]["steps"][-1]
    assert upload["if"] == "always()"
    assert upload["with"]["path"] == "compress-report/"
    assert gitlab()["artifacts"]["when"] == "always"
    assert gitlab()["artifacts"]["paths"] == ["compress-report/"]
    assert gitlab()["rules"] == [{"if": '$CI_PIPELINE_SOURCE == "merge_request_event"'}]
