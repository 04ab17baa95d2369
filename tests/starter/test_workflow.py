"""What the CI job installs, and which file it is."""

from __future__ import annotations

import json
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from commandline import ROOT
from ruamel.yaml import YAML

from compress.starter.workflow import Ci, requirement, workflow_text

COMMIT = "0" * 40
FILES: dict[Ci, str] = {"github": "github-actions.yml", "gitlab": "gitlab-ci.yml"}


def installed(folder: Path, **files: str) -> Distribution:
    info = folder / "compress-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: compress\nVersion: 0.1.0\n")
    for name, text in files.items():
        (info / name.replace("_json", ".json")).write_text(text)
    return Distribution.at(info)


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (
            {"url": "https://host/o/compress", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"git+https://host/o/compress@{COMMIT}",
        ),
        ({"url": "https://host/compress-0.1.0-py3-none-any.whl", "archive_info": {}}, None),
        ({"url": "file:///somewhere/compress", "dir_info": {"editable": True}}, ""),
    ],
)
def test_what_pip_recorded_is_installed_again(tmp_path: Path, origin: dict[str, object], wanted: str | None) -> None:
    package = installed(tmp_path, direct_url_json=json.dumps(origin), INSTALLER="pip\n")
    assert requirement(package) == (origin["url"] if wanted is None else wanted)


def test_a_version_from_an_index_and_an_unknown_origin(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert requirement(installed(tmp_path / "a", INSTALLER="pip\n")) == "compress==0.1.0"
    assert requirement(installed(tmp_path / "b")) == ""


@pytest.mark.parametrize("ci", FILES)
def test_the_published_files_are_what_init_writes(ci: Ci) -> None:
    published = (ROOT / "recipes" / "ci" / FILES[ci]).read_text(encoding="utf-8")
    assert workflow_text(ci, "compress.yaml", "") == published


@pytest.mark.parametrize("ci", FILES)
def test_odd_names_stay_values(ci: Ci) -> None:
    name, package = 'a "b": $(c) #d\n${{ secrets.E }}.yaml', "git+https://host/o/compress@main"
    text = YAML(typ="safe", pure=True).load(workflow_text(ci, name, package))
    if ci == "gitlab":
        variables = text["compress"]["variables"]
        assert variables["RECIPE"] == {"value": name, "expand": False}
        assert variables["COMPRESS_PACKAGE"] == {"value": package, "expand": False}
    else:
        assert text["env"]["RECIPE"] == name.replace("${{", "${{ '${{' }}")
        assert text["env"]["COMPRESS_PACKAGE"] == package
