from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import byte_tokenizer, tiny_bert

from compress.data.retrieval import RetrievalSet, default_retrieval, without_title
from compress.errors import BrokenResultError, UsageError
from compress.measure import retrieval
from compress.measure.encoder import Pooling
from compress.measure.retrieval import Ranks, compare_retrieval, gains, ranks, retrieval_measurements
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent


def load(folder: Path) -> torch.nn.Module:
    return load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("title", "text", "expected"),
    [
        ("Ore", "Ore is more than an ore; therefore ORE.", "is more than an ; therefore ."),
        ("Cook Islands", "The Cook Islands (cook islands) lie\nfar away.", "The ( ) lie far away."),
        ("Mole (animal)", "Moles. A mole (animal), digging", "Moles. A , digging"),
        ("C++", "C++ is a language; C+ is none", "is a language; C+ is none"),
        ("Eel", "Eels are eels", "Eels are eels"),
    ],
)
def test_the_title_is_taken_out_as_whole_words(title: str, text: str, expected: str) -> None:
    assert without_title(text, title) == expected


def test_the_set_of_the_package_is_complete_and_gives_nothing_away() -> None:
    found = default_retrieval(1004)
    assert len(found.queries) == len(set(found.queries)) == 1004
    assert all(len(document) > 40 for document in found.documents)
    for query, document in zip(found.queries, found.documents, strict=True):
        assert without_title(document, query) == document
    assert found == default_retrieval(1004)
    few = default_retrieval(20)
    assert few.documents == found.documents[:20]
    assert few.sha256 != found.sha256


@pytest.mark.parametrize("documents", [0, 1, 1005])
def test_a_set_of_an_impossible_size_is_refused(documents: int) -> None:
    with pytest.raises(UsageError, match="2 to 1004"):
        default_retrieval(documents)


def test_ranks_agree_with_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 30, 4, generator=generator, dtype=torch.float64)
    queries, documents = torch.nn.functional.normalize(first), torch.nn.functional.normalize(first + second)
    order = (queries @ documents.T).argsort(dim=1, descending=True)
    expected = [int((order[i] == i).nonzero()) + 1 for i in range(30)]
    assert ranks(queries, documents).tolist() == expected
    assert max(expected) > 10
    assert min(expected) == 1


def test_who_scores_the_same_stands_first() -> None:
    same = torch.ones(12, 1, dtype=torch.float64)
    assert ranks(same, same).tolist() == [12] * 12


def test_gains_are_discounted_by_rank_and_end_at_ten() -> None:
    found = gains(np.array([1, 2, 3, 10, 11, 500]))
    assert found.tolist() == [1.0, 1 / math.log2(3), 0.5, 1 / math.log2(11), 0.0, 0.0]


def test_figures_are_paired_by_query() -> None:
    rng = np.random.default_rng(0)
    original = rng.integers(1, 15, 400)
    result = np.where(rng.random(400) < 0.1, original + 1, original)
    found = retrieval_measurements(Ranks(original, result), levels=(0.9,), seed=1, conditions={"device": "cpu"})
    before, after, drop = found
    assert [(one.metric, one.subject, one.count) for one in found] == [
        ("ndcg", "original", 400),
        ("ndcg", "result", 400),
        ("ndcg.drop", "result/original", 400),
    ]
    assert before.value == pytest.approx(100 * gains(original).mean())
    assert drop.value == pytest.approx(before.value - after.value)
    assert set(drop.one_sided) == {0.9, 0.95}
    assert drop.conditions == {"device": "cpu"}
    widths = [one.interval.high - one.interval.low for one in (before, drop) if one.interval is not None]
    assert widths[1] < widths[0] / 3


@pytest.mark.parametrize("count", [20, 1004])
def test_no_change_of_few_queries_proves_little(count: int) -> None:
    drop = retrieval_measurements(Ranks(np.ones(count, dtype=np.int64), np.ones(count, dtype=np.int64)))[2]
    assert drop.value == 0.0
    assert drop.one_sided[0.95][1] == pytest.approx(100 * (1 - 0.05 ** (1 / count)))


def small_set() -> RetrievalSet:
    rng = np.random.default_rng(2)
    texts = ["".join(chr(97 + letter) for letter in rng.integers(0, 26, 5 + index % 9)) for index in range(24)]
    return RetrievalSet(tuple(texts), tuple(text + " and more" for text in texts), "0" * 64)


def test_both_models_rank_the_same_texts(tmp_path: Path) -> None:
    original, other = load(tiny_bert(tmp_path / "a")), load(tiny_bert(tmp_path / "b", seed=1))
    asked = {"retrieval": small_set(), "tokenizer": byte_tokenizer(), "pooling": Pooling(), "length": 64}
    found = compare_retrieval(original, other, **asked, progress=Silent())
    assert found.original.tolist() != found.result.tolist()
    same = compare_retrieval(other, original, **asked, progress=Silent())
    assert same.original.tolist() == found.result.tolist()
    with torch.inference_mode():
        vectors = [
            [
                other(byte_tokenizer()(text, return_tensors="pt")["input_ids"]).last_hidden_state[0].double().mean(0)
                for text in texts
            ]
            for texts in (small_set().queries, small_set().documents)
        ]
    units = [torch.nn.functional.normalize(torch.stack(one)) for one in vectors]
    assert ranks(*units).tolist() == found.result.tolist()
    rows = json.loads(json.dumps(found.rows()))
    assert [row["query"] for row in rows] == list(range(24))
    assert [row["rank_result"] for row in rows] == found.result.tolist()


def test_long_documents_are_cut(tmp_path: Path) -> None:
    model = load(tiny_bert(tmp_path))
    long = RetrievalSet(("a", "b"), ("a" * 500, "b" * 500), "0" * 64)
    asked = {"tokenizer": byte_tokenizer(), "pooling": Pooling(), "progress": Silent()}
    found = compare_retrieval(model, model, long, **asked, length=128)
    assert found.original.tolist() == found.result.tolist()


def test_a_broken_model_and_texts_without_tokens_are_refused(tmp_path: Path) -> None:
    model, broken = load(tiny_bert(tmp_path / "a")), load(tiny_bert(tmp_path / "b"))
    with torch.no_grad():
        broken.encoder.layer[1].output.dense.weight[0, 0] = float("nan")
    asked = {"tokenizer": byte_tokenizer(), "pooling": Pooling(), "length": 64, "progress": Silent()}
    with pytest.raises(BrokenResultError, match="result model"):
        compare_retrieval(model, broken, small_set(), **asked)
    with pytest.raises(UsageError, match="1 of 2 texts"):
        compare_retrieval(model, model, RetrievalSet(("a", ""), ("b", "c"), "0" * 64), **asked)
