"""Whether an encoder still finds the right document: nDCG@10 of a retrieval set, both models on the same texts.

    nDCG@10 = 1 / log2(1 + rank) if rank <= 10, else 0

for a query with one relevant document (Jarvelin and Kekalainen 2002, "Cumulated gain-based evaluation of IR
techniques"; the ideal gain is 1). Documents are ranked by the cosine to the query; a document that scores the same as
the relevant one stands before it, so that a model which gives every text one embedding finds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compress.data.retrieval import RetrievalSet
from compress.data.text import Corpus
from compress.data.windows import encoder_windows
from compress.errors import UsageError
from compress.measure.encoder import Pooling, check_widths, unit_embeddings
from compress.measure.statistics import Estimate, block_mean
from compress.measure.tasks.paired import constant_mean
from compress.records import ORIGINAL, PAIRED, RESULT, Measurement

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compress.progress import Advance, Progress

CUT = 10
ROWS = 256
"""Queries that are scored against all documents at a time."""


@dataclass(frozen=True)
class Ranks:
    """Rank of the relevant document of each query, from 1, in each model: int64 [Q]."""

    original: npt.NDArray[np.int64]
    result: npt.NDArray[np.int64]

    def rows(self) -> list[dict[str, Any]]:
        """One row of plain data per query for the raw file in the report folder."""
        ranks = zip(self.original.tolist(), self.result.tolist(), strict=True)
        return [
            {"kind": "retrieval", "query": query, "rank_original": original, "rank_result": result}
            for query, (original, result) in enumerate(ranks)
        ]


def compare_retrieval(
    original: PreTrainedModel,
    result: PreTrainedModel,
    retrieval: RetrievalSet,
    tokenizer: PreTrainedTokenizerBase,
    pooling: Pooling,
    *,
    length: int,
    progress: Progress,
) -> Ranks:
    """Embeds all queries and documents with both models and ranks the documents.

    Args:
        length: tokens that a text is cut to, special ones included; within the model's positions.

    Raises:
        BrokenResultError: an embedding is not finite or zero, or the widths differ.
        UsageError: the tokenizer gives no token for a text.
    """
    queries = _ids(retrieval.queries, tokenizer, length)
    documents = _ids(retrieval.documents, tokenizer, length)
    with torch.inference_mode(), progress.phase("retrieval", 2 * (len(queries) + len(documents))) as advance:
        first = _embedded(original, queries, documents, pooling, ORIGINAL, advance)
        second = _embedded(result, queries, documents, pooling, RESULT, advance)
        check_widths(first[0], second[0])
        return Ranks(ranks(*first), ranks(*second))


def retrieval_measurements(
    found: Ranks,
    *,
    levels: Sequence[float] = (),
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """ndcg of both models and ndcg.drop, with 95 % bootstrap intervals over queries; the drop is paired.

    Args:
        levels: one-sided confidence levels that gates ask for; 0.95 is always added.
    """
    wanted, facts, count = tuple(sorted({0.95, *levels})), dict(conditions or {}), len(found.original)

    def measured(metric: str, subject: str, estimate: Estimate) -> Measurement:
        return Measurement(metric, subject, estimate.value, count, estimate.interval, estimate.one_sided, facts)

    def mean(values: npt.NDArray[np.float64]) -> Estimate:
        rng = np.random.default_rng(seed)
        return block_mean(100 * values, np.arange(count), rng=rng, levels=wanted, blocks_are=f"{count} queries")

    original, result = gains(found.original), gains(found.result)
    # Where no query changed, resampling shows no spread; others might change, each by 100 points at most.
    unchanged = constant_mean(0.0, -100.0, 100.0, count, levels=wanted)
    drop = mean(original - result) if (original != result).any() else unchanged
    return [
        measured("ndcg", ORIGINAL, mean(original)),
        measured("ndcg", RESULT, mean(result)),
        measured("ndcg.drop", PAIRED, drop),
    ]


def ranks(queries: Tensor, documents: Tensor) -> npt.NDArray[np.int64]:
    """Rank, from 1, of document i for query i: how many documents are at least as close, [Q].

    Args:
        queries, documents: [Q, d] of length 1 each.
    """
    found = []
    for start in range(0, len(queries), ROWS):
        scores = queries[start : start + ROWS] @ documents.T  # [rows, Q]
        relevant = scores.diagonal(start).unsqueeze(-1)  # [rows, 1]
        found.append((scores >= relevant).sum(dim=-1))
    joined: npt.NDArray[np.int64] = torch.cat(found).numpy()
    return joined


def gains(found: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """nDCG@10 of each query, 0..1, from the rank of its document."""
    gained: npt.NDArray[np.float64] = np.where(found <= CUT, 1 / np.log2(1 + found), 0.0)
    return gained


def _ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[Tensor, ...]:
    corpus = Corpus("the retrieval set", tuple(texts), len(texts), 0, frozenset(), "")
    found = encoder_windows(corpus, tokenizer, length=length).ids
    if len(found) != len(texts):
        raise UsageError(
            f"the tokenizer gives no token for {len(texts) - len(found)} of {len(texts)} texts of the retrieval set",
            hint="check the tokenizer's files, or leave retrieval out (`retrieval: null`)",
        )
    return found


def _embedded(
    model: PreTrainedModel,
    queries: Sequence[Tensor],
    documents: Sequence[Tensor],
    pooling: Pooling,
    name: str,
    advance: Advance,
) -> tuple[Tensor, Tensor]:
    units = unit_embeddings(model, [*queries, *documents], pooling, name, advance)
    return units[: len(queries)], units[len(queries) :]
