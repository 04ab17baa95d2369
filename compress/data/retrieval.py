"""A retrieval set out of the evaluation text inside the package: find an article by its title.

A query is a title and its only relevant document the article's text, with the title taken out so that it cannot be
found by its letters. The title is taken out wherever it stands as whole words, in upper or lower case; inside longer
words it stays ("Ore" in "more", but also "Eel" in "eels").
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from importlib import resources

from compress.errors import UsageError


@dataclass(frozen=True)
class RetrievalSet:
    """Queries and documents, [Q] each: document i is the only relevant one of query i.

    Attributes:
        sha256: over all queries and documents, in order.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    sha256: str


def default_retrieval(documents: int) -> RetrievalSet:
    """The first `documents` articles of the evaluation text inside the package.

    Raises:
        UsageError: there are fewer, or fewer than two are asked for.
    """
    content = resources.files("compress.data").joinpath("default", "evaluation.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in content.splitlines()]
    if not 2 <= documents <= len(rows):
        raise UsageError(
            f"a retrieval set of {documents} documents is asked for; it can have 2 to {len(rows)}",
            hint=f"the text inside the package has {len(rows)} articles with titles",
        )
    queries = tuple(row["title"] for row in rows[:documents])
    texts = tuple(without_title(row["text"], row["title"]) for row in rows[:documents])
    content_hash = hashlib.sha256(json.dumps([queries, texts]).encode()).hexdigest()
    return RetrievalSet(queries, texts, content_hash)


def without_title(text: str, title: str) -> str:
    """`text` without `title` where it stands as whole words, in any case; white space becomes single spaces."""
    whole = re.compile(rf"(?<!\w){re.escape(title)}(?!\w)", re.IGNORECASE)
    return " ".join(whole.sub(" ", text).split())
