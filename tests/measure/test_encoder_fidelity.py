from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from tiny import tiny_bert

from compress.data.windows import Windows
from compress.errors import BrokenResultError, UsageError
from compress.measure.encoder import (
    POOLINGS,
    EncoderTexts,
    Pooling,
    compare_embeddings,
    embed,
    encoder_floor,
    encoder_floor_measurements,
    encoder_measurements,
    longest_text,
    read_pooling,
)
from compress.measure.similarity import Similarities, spearman
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent


def load(folder: Path) -> torch.nn.Module:
    return load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load(tiny_bert(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load(tiny_bert(tmp_path_factory.mktemp("bert"), seed=1))


def texts(count: int) -> Windows:
    generator = torch.Generator().manual_seed(7)
    ids = tuple(torch.randint(0, 256, (5 + index % 7,), generator=generator) for index in range(count))
    return Windows(
        source="random",
        length=max(map(len, ids)),
        lines_read=count,
        tokens_asked=None,
        ids=ids,
        special=1,
        tokens=sum(map(len, ids)),
        lines_used=count,
        samples_asked=None,
        text_sha256="0" * 64,
    )


def pooling_folder(folder: Path, config: dict[str, object], *, normalize: bool = False) -> Path:
    modules = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    names = [{"idx": i, "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(names))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | config))
    return folder


def test_a_model_against_itself_has_cosine_one(original: torch.nn.Module) -> None:
    found = compare_embeddings(original, original, texts(60), Pooling(), Silent())
    assert found.cosine.tolist() == [1.0] * 60
    mean, p5, spearman = encoder_measurements(found)
    assert (mean.metric, mean.value, mean.count) == ("cosine.mean", 1.0, 60)
    assert (p5.metric, p5.value) == ("cosine.p5", 1.0)
    assert (spearman.metric, spearman.value) == ("similarity.spearman", pytest.approx(1.0, abs=1e-12))


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_cosine_agrees_with_a_slow_reference(original: torch.nn.Module, other: torch.nn.Module, mode: str) -> None:
    given = texts(8)
    found = compare_embeddings(original, other, given, Pooling((mode,)), Silent())
    pool = {"mean": lambda s: s.mean(0), "cls": lambda s: s[0], "max": lambda s: s.max(0).values}[mode]
    with torch.inference_mode():
        alone = [
            [pool(model(ids[None]).last_hidden_state[0].double()) for ids in given.ids] for model in (original, other)
        ]
    for index, (a, b) in enumerate(zip(*alone, strict=True)):
        expected = torch.nn.functional.cosine_similarity(a, b, dim=0)
        assert found.cosine[index] == pytest.approx(float(expected), rel=1e-6)
    assert (np.abs(found.cosine) < 1).all()
    for similarities, vectors in zip((found.similarities.original, found.similarities.result), alone, strict=True):
        pairs = [torch.nn.functional.cosine_similarity(a, b, dim=0) for a, b in combinations(vectors, 2)]
        np.testing.assert_allclose(similarities, [float(pair) for pair in pairs], rtol=1e-6)


def test_pooling_is_read_from_the_folder(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling(("mean",), normalize=False)
    config = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}
    assert read_pooling(pooling_folder(tmp_path, config, normalize=True)) == Pooling(("cls", "max"), True)


def test_the_newer_single_name_is_read_too(tmp_path: Path) -> None:
    assert read_pooling(pooling_folder(tmp_path, {"pooling_mode": "cls"})) == Pooling(("cls",))


@pytest.mark.parametrize("config", [{"pooling_mode_magic_tokens": True}, {"pooling_mode_cls_token": False}])
def test_an_unknown_pooling_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"1_Pooling/config.json: pooling (magic|none)"):
        read_pooling(pooling_folder(tmp_path, config))


def embedded(model: torch.nn.Module, given: Sequence[torch.Tensor], pooling: Pooling) -> torch.Tensor:
    with torch.inference_mode():
        return embed(model, given, pooling, torch.device("cpu"), lambda _amount: None)


def test_normalize_gives_unit_length_and_modes_are_concatenated(original: torch.nn.Module) -> None:
    ids = texts(1).ids
    plain = embedded(original, ids, Pooling(("cls", "max")))
    unit = embedded(original, ids, Pooling(("cls", "max"), normalize=True))
    assert plain.shape == (1, 128)
    assert float(unit.norm()) == pytest.approx(1.0)
    torch.testing.assert_close(unit * plain.norm(), plain)


@pytest.mark.parametrize("mode", list(POOLINGS))
def test_texts_of_one_length_share_a_batch_and_come_back_in_order(original: torch.nn.Module, mode: str) -> None:
    given, pooling = texts(16).ids, Pooling((mode,))
    alone = torch.cat([embedded(original, [ids], pooling) for ids in given])
    torch.testing.assert_close(embedded(original, given, pooling), alone, rtol=1e-5, atol=1e-5)


def test_a_broken_embedding_names_model_and_window(original: torch.nn.Module, tmp_path: Path) -> None:
    given, broken = texts(3), load(tiny_bert(tmp_path))
    row = next(int(id_) for id_ in given.ids[2] if id_ not in torch.cat(given.ids[:2]))
    with torch.no_grad():
        broken.get_input_embeddings().weight[row] = float("nan")
    with pytest.raises(BrokenResultError, match=r"result model .* window 2"):
        compare_embeddings(original, broken, given, Pooling(), Silent())


def random_texts(count: int, noise: float = 0.1) -> EncoderTexts:
    """Texts of which 3 to 10 are compared pairwise; the result's similarities are the original's with noise."""
    rng = np.random.default_rng(1)
    pairs = rng.uniform(-1, 1, 45 if count > 10 else count * (count - 1) // 2)
    similarities = Similarities(pairs, pairs + noise * rng.normal(size=len(pairs)))
    return EncoderTexts(rng.uniform(0.9, 1.0, count), similarities)


def test_p5_needs_59_texts() -> None:
    carried = encoder_measurements(random_texts(59), levels=(0.9,))[1]
    assert carried.value == np.quantile(random_texts(59).cosine, 0.05)
    assert set(carried.one_sided) == {0.9, 0.95}
    mean, short, _ = encoder_measurements(random_texts(58))
    assert mean.value == pytest.approx(random_texts(58).cosine.mean())
    assert short.value is None
    assert short.note is not None
    assert "59" in short.note


def test_rows_say_which_text_and_which_pair() -> None:
    rows = json.loads(json.dumps(random_texts(4).rows()))
    assert [row["text"] for row in rows[:4]] == [0, 1, 2, 3]
    assert [row["cosine"] for row in rows[:4]] == random_texts(4).cosine.tolist()
    assert [row["pair"] for row in rows[4:]] == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert [row["result"] for row in rows[4:]] == random_texts(4).similarities.result.tolist()


def test_spearman_is_scipys_and_knows_that_pairs_share_texts() -> None:
    found = random_texts(60, noise=0.4)
    measured = encoder_measurements(found, levels=(0.9,))[2]
    expected = scipy.stats.spearmanr(found.similarities.original, found.similarities.result).statistic
    assert measured.value == pytest.approx(expected, rel=1e-12)
    assert (measured.count, measured.conditions["pairs"]) == (10, 45)
    assert measured.interval is not None
    assert measured.interval.low < measured.one_sided[0.95][0] < measured.one_sided[0.9][0] < measured.value
    same = encoder_measurements(found, levels=(0.9,))[2]
    assert same == measured


@pytest.mark.parametrize("count", [6, 20])
def test_the_interval_of_spearman_holds_the_truth(count: int) -> None:
    """Similarities that follow texts: one odd text spoils all its pairs, and the interval must allow for that."""
    rng, truth, missed = np.random.default_rng(count), 0.583, 0  # truth: of 2,000 such texts
    for _ in range(60):
        units = rng.normal(size=(count, 4))
        pairs = units @ units.T
        moved = units + 0.8 * rng.normal(size=units.shape)
        place = np.triu_indices(count, 1)
        estimate = spearman(Similarities(pairs[place], (moved @ moved.T)[place]), rng=np.random.default_rng(0))
        assert estimate.interval is not None
        missed += not estimate.interval.low <= truth <= estimate.interval.high
    assert missed <= 9


@pytest.mark.parametrize(
    ("similarities", "why"),
    [
        (Similarities(np.zeros(0), np.zeros(0)), "1 texts have no order"),
        (Similarities(np.array([0.5]), np.array([0.4])), "2 texts have no order"),
        (Similarities(np.full(3, 0.5), np.array([0.1, 0.2, 0.3])), "equally far apart"),
    ],
)
def test_no_spearman_without_an_order(similarities: Similarities, why: str) -> None:
    measured = encoder_measurements(EncoderTexts(np.ones(3), similarities))[2]
    assert measured.value is None
    assert measured.note is not None
    assert why in measured.note


def test_four_texts_are_too_few_for_an_interval_of_spearman() -> None:
    measured = encoder_measurements(random_texts(4))[2]
    assert measured.value is not None
    assert (measured.interval, measured.one_sided) == (None, {})


def test_the_floor_is_the_original_in_bfloat16(original: torch.nn.Module) -> None:
    given = texts(70)
    before = {name: weight.clone() for name, weight in original.named_parameters()}
    floor = encoder_floor(original, given, Pooling(), Silent())
    assert all(torch.equal(weight, before[name]) for name, weight in original.named_parameters())
    assert floor.cosine is not None
    assert floor.cosine.shape == (64,)
    with torch.inference_mode():
        halved = deepcopy(original).to(torch.bfloat16)
        a, b = (model(given.ids[3][None]).last_hidden_state[0].double().mean(0) for model in (original, halved))
    expected = torch.nn.functional.cosine_similarity(a, b, dim=0)
    assert 1 - floor.cosine[3] == pytest.approx(1 - float(expected), rel=1e-3)
    mean, p5 = encoder_floor_measurements(floor)
    assert (mean.subject, mean.value) == ("original/original", pytest.approx(floor.cosine.mean()))
    assert (p5.subject, p5.conditions["comparison"]) == ("original/original", "bfloat16 against float32")
    assert {row["kind"] for row in floor.rows()} == {"floor"}


def test_no_floor_where_bfloat16_overflows(tmp_path: Path) -> None:
    """float32's largest number rounds to infinity in bfloat16; gelu makes 0 of the one and NaN of the other."""
    model = load(tiny_bert(tmp_path))
    with torch.no_grad():
        model.encoder.layer[0].intermediate.dense.bias[0] = torch.finfo(torch.float32).min
    floor = encoder_floor(model, texts(3), Pooling(), Silent())
    assert floor.cosine is None
    assert floor.rows() == []
    (missing,) = encoder_floor_measurements(floor)
    assert missing.value is None
    assert missing.note == "the original's embeddings are not finite in bfloat16"


def test_the_longest_text_is_what_sentence_transformers_reads(tmp_path: Path) -> None:
    assert longest_text(tmp_path) is None
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert longest_text(tmp_path) == 256
