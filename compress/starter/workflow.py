"""The job of a CI system that runs the recipe. The templates are whole files, as they stand in `recipes/ci/`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import files
from typing import Literal

from compress.starter.quoting import github_text, quoted

Ci = Literal["github", "gitlab"]


@dataclass(frozen=True)
class _System:
    """Attributes:
    path: where the file belongs, from the repository's root.
    recipe, package: what stands in the template before the value that is filled in.
    """

    path: str
    template: str
    recipe: str
    package: str
    write: Callable[[str], str]


SYSTEMS: dict[Ci, _System] = {
    "github": _System(
        ".github/workflows/compress.yml",
        "github-actions.yml",
        "  RECIPE: ",
        "  COMPRESS_PACKAGE: ",
        github_text,
    ),
    "gitlab": _System(
        ".gitlab/compress.yml",
        "gitlab-ci.yml",
        "    RECIPE:\n      value: ",
        "    COMPRESS_PACKAGE:\n      value: ",
        quoted,
    ),
}


def workflow_text(ci: Ci, recipe: str, package: str) -> str:
    """The job's file.

    Args:
        recipe: its path from the repository's root.
        package: what pip installs; empty where that has to be filled in.
    """
    system = SYSTEMS[ci]
    text = files("compress.starter").joinpath("templates", system.template).read_text(encoding="utf-8")
    text = _filled(text, system.recipe, "compress.yaml", system.write(recipe))
    return _filled(text, system.package, "", system.write(package))


def installed_from() -> str:
    """What pip can install to get this very compress elsewhere; empty where nobody but this machine has it."""
    try:
        return requirement(distribution("compress"))
    except PackageNotFoundError:
        return ""


def requirement(package: Distribution) -> str:
    """A requirement for pip: a commit or an archive that PEP 610 records, a version of an index, or nothing."""
    recorded = package.read_text("direct_url.json")
    if recorded is None:
        by_pip = (package.read_text("INSTALLER") or "").strip() in ("pip", "uv")
        return f"{package.metadata['Name']}=={package.version}" if by_pip else ""
    origin = json.loads(recorded)
    url, repository = str(origin.get("url", "")), origin.get("vcs_info")
    if repository:
        return f"{repository['vcs']}+{url}@{repository['commit_id']}"
    return url if url.startswith("https://") else ""


def _filled(text: str, before: str, default: str, value: str) -> str:
    asked = f'{before}"{default}"\n'
    assert text.count(asked) == 1
    return text.replace(asked, f"{before}{value}\n")
