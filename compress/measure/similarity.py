"""Whether an encoder keeps the order of similarities: which texts are close to each other and which are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.stats

from compress.measure.statistics import QUANTILE_DRAWS, Estimate, from_draws
from compress.records import PAIRED, Measurement

FloatArray = npt.NDArray[np.float64]
FEWEST_TEXTS = 3
"""Two texts are one pair, and one pair has no order."""
FEWEST_FOR_INTERVAL = 5
"""Resamples of fewer texts are mostly two or three pairs, whose correlation is 1 or -1 whatever the model."""


@dataclass(frozen=True)
class Similarities:
    """Cosines among n texts in each model, both [n (n - 1) / 2]: pairs (i, j) with i < j, row by row."""

    original: FloatArray
    result: FloatArray

    @property
    def texts(self) -> int:
        return int((1 + (1 + 8 * len(self.original)) ** 0.5) / 2)

    def rows(self) -> list[dict[str, Any]]:
        """One row of plain data per pair, nothing rounded."""
        first, second = np.triu_indices(self.texts, 1)
        return [
            {"kind": "similarity", "pair": [i, j], "original": original, "result": result}
            for i, j, original, result in zip(
                first.tolist(), second.tolist(), self.original.tolist(), self.result.tolist(), strict=True
            )
        ]


def pair_cosines(units: FloatArray) -> FloatArray:
    """Cosines of all pairs i < j of unit vectors [n, d], row by row: [n (n - 1) / 2]."""
    found: FloatArray = (units @ units.T)[np.triu_indices(len(units), 1)]
    return found


def similarity_measurement(
    similarities: Similarities, *, levels: Sequence[float], seed: int, conditions: Mapping[str, Any]
) -> Measurement:
    """similarity.spearman; without a value where there are too few texts, or all are equally far apart."""
    texts, pairs = similarities.texts, len(similarities.original)
    facts = dict(conditions) | {"texts": texts, "pairs": pairs}
    metric = "similarity.spearman"
    if texts < FEWEST_TEXTS:
        note = f"{texts} texts have no order of similarities; it needs {FEWEST_TEXTS}"
        return Measurement(metric, PAIRED, None, texts, conditions=facts, note=note)
    if _constant(similarities.original) or _constant(similarities.result):
        note = "all texts are equally far apart in one of the models"
        return Measurement(metric, PAIRED, None, texts, conditions=facts, note=note)
    found = spearman(similarities, rng=np.random.default_rng(seed), levels=levels)
    return Measurement(metric, PAIRED, found.value, texts, found.interval, found.one_sided, facts)


def spearman(similarities: Similarities, *, rng: np.random.Generator, levels: Sequence[float] = (0.95,)) -> Estimate:
    """Spearman's rank correlation of the pairs, with a bootstrap over texts.

    Pairs that share a text are not independent, so texts are drawn, and every pair of drawn texts comes with them. A
    text drawn twice brings no pair with itself: in both models that similarity is 1. There is no interval for fewer
    than FEWEST_FOR_INTERVAL texts.
    """
    texts = similarities.texts
    value = _rank_correlation(similarities.original, similarities.result)
    if texts < FEWEST_FOR_INTERVAL:
        return Estimate(value)
    first, second = np.triu_indices(texts, 1)
    where = np.zeros((texts, texts), dtype=np.int64)  # pair (i, j) -> its place in the arrays
    where[first, second] = where[second, first] = np.arange(len(first))
    draws = []
    for _ in range(QUANTILE_DRAWS):
        drawn = rng.integers(0, texts, size=texts)
        i, j = drawn[first], drawn[second]
        pairs = where[i, j][i != j]
        original, result = similarities.original[pairs], similarities.result[pairs]
        if len(pairs) and not _constant(original) and not _constant(result):
            draws.append(_rank_correlation(original, result))
    return from_draws(value, np.array(draws), texts, levels, 0.95, f"bootstrap, {texts} texts")


def _rank_correlation(a: FloatArray, b: FloatArray) -> float:
    if bool((a == b).all()):
        return 1.0  # rounding in the quotient must not make equal orders differ
    return float(scipy.stats.spearmanr(a, b).statistic)


def _constant(values: FloatArray) -> bool:
    return bool((values == values[0]).all())
