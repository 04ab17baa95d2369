"""From a model to the files of a start: recipe, JSON Schema, CI job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from compress.errors import UsageError
from compress.model.hub import is_local
from compress.starter.choices import Start, absolute, choose
from compress.starter.recipe import check_recipe, recipe_text, schema_text
from compress.starter.workflow import SYSTEMS, Ci, installed_from, workflow_text
from compress.starter.writing import check_free, write_new

SCHEMA = "recipe.schema.json"


@dataclass(frozen=True)
class Started:
    """Attributes:
    files: what was written, the recipe first.
    workflow: the CI job's file, or None.
    notes: what is still to do before the CI job runs.
    """

    recipe: Path
    workflow: Path | None
    files: tuple[Path, ...]
    target: str
    notes: tuple[str, ...]


def start(model: str, recipe: Path, target: str | None, ci: Ci | None) -> Started:
    """Writes a recipe for a model, the schema that it names where none is there yet, and a CI job; or nothing at all.

    Args:
        recipe: file to write; the job goes where its system looks for it, below the working directory.
        target: None is the usual one for the kind of model.

    Raises:
        UsageError: a file is there already, the model cannot be quantized (to this target), a name that no recipe
            can hold, a place where a CI job would not find the recipe.
        MissingResourceError: no such model.
    """
    here = Path.cwd()
    job = None if ci is None else Path(SYSTEMS[ci].path)
    inside = None if ci is None else from_root(recipe, here, ci)
    check_free([recipe] if job is None else [recipe, job])
    chosen, checkpoint = choose(model, target, here)
    texts = {recipe: recipe_text(chosen)}
    check_recipe(texts[recipe], checkpoint)
    schema = recipe.with_name(SCHEMA)
    if schema != recipe and not os.path.lexists(schema):
        texts[schema] = schema_text()
    notes: tuple[str, ...] = ()
    if ci is not None and job is not None and inside is not None:
        package = installed_from()
        texts[job] = workflow_text(ci, inside, package)
        notes = to_do(chosen, ci, package, here)
    write_new(texts)
    return Started(recipe, job, tuple(texts), chosen.target.name, notes)


def from_root(recipe: Path, here: Path, ci: Ci) -> str:
    """The recipe as the CI job names it, which starts in the root. Raises UsageError where it would not find it."""
    only = "or write only the recipe: --ci none."
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    if root != here:
        raise UsageError(
            f"a CI job starts in the root of the repository, {root}, and this is another folder.",
            hint=f"Go there first, {only}",
        )
    place = absolute(recipe)
    if not place.is_relative_to(here):
        raise UsageError(
            f"{recipe}: outside of this folder, where a CI job cannot read it.",
            hint=f"Put the recipe below this folder (-o), {only}",
        )
    if place == here / SYSTEMS[ci].path:
        raise UsageError(f"{recipe}: the CI job goes there.", hint=f"Give the recipe another name (-o), {only}")
    return place.relative_to(here).as_posix()


def to_do(chosen: Start, ci: Ci, package: str, here: Path) -> tuple[str, ...]:
    """What the CI job still needs."""
    notes = []
    if ci == "gitlab":
        notes.append("add to .gitlab-ci.yml: include: [{local: .gitlab/compress.yml}]")
    if not package:
        notes.append(f"fill in COMPRESS_PACKAGE in {SYSTEMS[ci].path}: what pip installs there to have this program")
    if is_local(chosen.model):
        below = absolute(Path(chosen.model)).is_relative_to(here)
        notes.append(
            "commit the model (Git LFS), or give the job a step that fetches it"
            if below
            else "the model lies outside of this folder, where the job does not find it: name a hub id in the recipe"
        )
    return tuple(notes)
