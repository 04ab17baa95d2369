from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_bert

from compress.data.windows import Windows
from compress.errors import BrokenResultError, UsageError
from compress.measure.encoder import (
    EncoderTexts,
    Pooling,
    compare_embeddings,
    embed,
    encoder_measurements,
    read_pooling,
)
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
    mean, p5 = encoder_measurements(found)
    assert (mean.metric, mean.value, mean.count) == ("cosine.mean", 1.0, 60)
    assert (p5.metric, p5.value) == ("cosine.p5", 1.0)


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_cosine_agrees_with_a_slow_reference(original: torch.nn.Module, other: torch.nn.Module, mode: str) -> None:
    given = texts(8)
    found = compare_embeddings(original, other, given, Pooling((mode,)), Silent())
    pool = {"mean": lambda s: s.mean(0), "cls": lambda s: s[0], "max": lambda s: s.max(0).values}[mode]
    with torch.inference_mode():
        for index, ids in enumerate(given.ids):
            a, b = (pool(model(ids[None]).last_hidden_state[0].double()) for model in (original, other))
            expected = torch.nn.functional.cosine_similarity(a, b, dim=0)
            assert found.cosine[index] == pytest.approx(float(expected), rel=1e-9)
    assert (np.abs(found.cosine) < 1).all()
    assert found.tokens.tolist() == [len(ids) for ids in given.ids]


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


def test_normalize_gives_unit_length_and_modes_are_concatenated(original: torch.nn.Module) -> None:
    ids = texts(1).ids[0]
    plain = embed(original, ids, Pooling(("cls", "max")))
    unit = embed(original, ids, Pooling(("cls", "max"), normalize=True))
    assert plain.shape == (128,)
    assert float(unit.norm()) == pytest.approx(1.0)
    torch.testing.assert_close(unit * plain.norm(), plain)


def test_a_broken_embedding_names_model_and_window(original: torch.nn.Module, tmp_path: Path) -> None:
    given, broken = texts(3), load(tiny_bert(tmp_path))
    row = next(int(id_) for id_ in given.ids[2] if id_ not in torch.cat(given.ids[:2]))
    with torch.no_grad():
        broken.get_input_embeddings().weight[row] = float("nan")
    with pytest.raises(BrokenResultError, match=r"result model .* window 2"):
        compare_embeddings(original, broken, given, Pooling(), Silent())


def test_p5_needs_59_texts() -> None:
    values = np.random.default_rng(1).uniform(0.9, 1.0, 59)
    _, carried = encoder_measurements(EncoderTexts(values, np.full(59, 8)), levels=(0.9,))
    assert carried.value == np.quantile(values, 0.05)
    assert set(carried.one_sided) == {0.9, 0.95}
    mean, short = encoder_measurements(EncoderTexts(values[:58], np.full(58, 8)))
    assert mean.value == pytest.approx(values[:58].mean())
    assert short.value is None
    assert short.note is not None
    assert "59" in short.note
