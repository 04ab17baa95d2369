"""The section `evaluate` of a recipe: what is measured about the result's answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, Strict, field_validator, model_validator
from pydantic_core import CoreSchema

from compress.recipe.fields import Count, Positive, Several, Text, Whole, choice, rule
from compress.recipe.section import Section
from compress.recipe.words import shown

PACKAGED_TASKS = ("next_sentence",)
"""Tasks whose items are inside the package."""
ROWS, TASK_FILES = ".jsonl", (".yaml", ".yml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")

TaskKind = Literal["multiple_choice", "cloze", "exact_match", "classification"]


Stops = Annotated[tuple[Annotated[str, Field(pattern=r"[\s\S]")], ...], Strict(False)]
"""Not Text: a line break is the usual one."""


class Fidelity(Section):
    """Comparison with the original on held-out text."""

    source: Text = "default"
    """Where the text comes from, as in `calibration`. Text that is in both is an error."""
    tokens: Count = 16_384
    """Number of tokens, such as 16384 or 16k."""
    length: Several = 512
    """Tokens in each window; the first one of a window is not predicted."""


class Task(Section):
    """Items with right and wrong answers, which both models answer."""

    name: Text
    """What the report and gates call it (`accuracy[NAME]`). Without a source: next_sentence, which is inside the
    package, or a task or group of lm-eval."""
    source: Text | None = None
    """File of the items (.jsonl), or of an lm-eval task (.yaml). Null: known by its name."""
    kind: Annotated[TaskKind, choice(get_args(TaskKind))] | None = None
    """What is done with the items of a .jsonl file. Null: what their keys say; cloze must be asked for."""
    metric: Text | None = None
    """What counts as right: acc or acc_norm (log-likelihood per character) of choices; of an lm-eval task any metric
    it has that is 0 or 1 for each item. Null: acc_norm where there is one."""
    prompt: Text = "{question}"
    """What the model reads before an answer; `{question}` stands for the item's."""
    items: Count | None = None
    """Largest number of items. Null: that of the section."""
    new_tokens: Positive = 32
    """Tokens to generate for an exact match."""
    stop: Stops = ("\n",)
    """Texts that end a generated answer."""
    fewshot: Whole | None = None
    """Examples before each item, for tasks of lm-eval. Null: what the task says."""

    @property
    def ours(self) -> bool:
        """Whether the items are read here and not by lm-eval."""
        return self.source.lower().endswith(ROWS) if self.source is not None else self.name in PACKAGED_TASKS

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise rule(
                f"must be letters, digits, `_`, `-` and `.`, at most 100, so that a gate can name it, not {shown(name)}"
            )
        return name

    @field_validator("source")
    @classmethod
    def _known_file(cls, source: str | None) -> str | None:
        if source is not None and not source.lower().endswith((ROWS, *TASK_FILES)):
            raise rule(f"must be a file of items (.jsonl) or of an lm-eval task (.yaml), not {shown(source)}")
        return source

    @model_validator(mode="after")
    def _only_what_applies(self) -> Self:
        for_ours, for_lm_eval = ("kind", "prompt", "new_tokens", "stop"), ("fewshot",)
        foreign = for_lm_eval if self.ours else for_ours
        given = [name for name in foreign if getattr(self, name) != type(self).model_fields[name].default]
        if given and self.source is None and self.name.lower().endswith((ROWS, *TASK_FILES)):
            raise rule(f"`{self.name}` is a file: give it as `source`, and a `name` without its ending")
        if given:
            why = "is for tasks of lm-eval" if self.ours else "is for .jsonl files; the task of lm-eval decides it"
            raise rule(f"`{given[0]}` {why}")
        return self


def _from_text(value: Any) -> Any:
    """`tasks/a.jsonl` as {name: a, source: tasks/a.jsonl}, another text as the name."""
    if not isinstance(value, str):
        return value
    if not value.lower().endswith((ROWS, *TASK_FILES)):
        return {"name": value}
    stem = re.sub(r"[^A-Za-z0-9_.\-]", "_", PurePath(value).stem)
    return {"name": stem if _NAME.fullmatch(stem) else f"task{stem[:90]}", "source": value}


class _OrText:
    """Says in the JSON Schema that a text may stand in for the map."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "pattern": r"\S"}, handler(core)]}


Tasks = Annotated[tuple[Annotated[Task, BeforeValidator(_from_text), _OrText], ...], Strict(False)]


class Generation(Section):
    """Greedy answers of both models to the same prompts."""

    prompts: Positive = 8
    """Number of prompts: the starts of the windows of `fidelity`."""
    prompt: Positive = 32
    """Tokens in each."""
    new_tokens: Positive = 48
    """Most tokens to generate."""


class Retrieval(Section):
    """Articles that an encoder finds by their titles."""

    documents: Annotated[int, Field(ge=20, le=1004)] = 1004
    """Number of articles."""


class Evaluate(Section):
    """What is measured about the result's answers."""

    fidelity: Fidelity | None = Fidelity()
    """Perplexity, KL and top-1 agreement of a decoder, cosine similarity of an encoder; null turns it off."""
    tasks: Tasks = ()
    """Tasks: a name or file each, or a map."""
    items: Count | None = None
    """Largest number of items of each task; always the same ones. Null: all."""
    generation: Generation | None = Generation()
    """Length, repetition and divergence of a decoder's greedy answers; null turns it off."""
    retrieval: Retrieval | None = Retrieval()
    """nDCG@10 of an encoder's embeddings; null turns it off."""

    @field_validator("tasks")
    @classmethod
    def _no_name_twice(cls, tasks: Sequence[Task]) -> Sequence[Task]:
        names = [task.name for task in tasks]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise rule(f"lists the task {twice} twice: give one of them another `name`")
        return tasks
