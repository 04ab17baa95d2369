from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_llama

from compress.data.windows import Windows
from compress.errors import BrokenResultError, UsageError
from compress.measure import fidelity
from compress.measure.fidelity import FidelityTokens, compare_logits, fidelity_measurements
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent
from compress.records import Measurement


def windows(*lengths: int, special: int = 0) -> Windows:
    generator = torch.Generator().manual_seed(7)
    ids = tuple(torch.randint(0, 256, (length,), generator=generator) for length in lengths)
    return Windows(
        source="random",
        length=max(map(len, ids)),
        lines_read=len(lengths),
        tokens_asked=None,
        ids=ids,
        special=special,
        tokens=sum(lengths),
        lines_used=len(lengths),
        samples_asked=None,
        text_sha256="0" * 64,
    )


def load(folder: Path) -> torch.nn.Module:
    return load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load(tiny_llama(tmp_path_factory.mktemp("original")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load(tiny_llama(tmp_path_factory.mktemp("other"), seed=1))


def by_metric(measurements: list[Measurement], subject: str = "result/original") -> dict[str, Measurement]:
    return {one.metric: one for one in measurements if one.subject == subject}


def test_a_model_against_itself_differs_in_nothing(original: torch.nn.Module) -> None:
    tokens = compare_logits(original, original, windows(40, 40, 40), Silent())
    assert tokens.kl.tolist() == tokens.tv.tolist() == [0.0] * 117
    assert tokens.same_top1.all()
    found = by_metric(fidelity_measurements(tokens))
    for metric in ("kl.mean", "kl.median", "tv.mean"):
        assert found[metric].value == 0.0
        assert found[metric].interval is not None
        assert (found[metric].interval.low, found[metric].interval.high) == (0.0, 0.0)
    assert found["top1.agreement"].value == 100.0
    assert found["top1.agreement"].one_sided[0.95] == (pytest.approx(100 * 0.05 ** (1 / 117)), 100.0)
    assert found["perplexity.ratio"].value == 1.0


def test_agrees_with_a_slow_reference(original: torch.nn.Module, other: torch.nn.Module) -> None:
    given = windows(9, 30, 2)
    tokens = compare_logits(original, other, given, Silent())
    kl, tv, nll, same, window = [], [], [], [], []
    with torch.inference_mode():
        for index, ids in enumerate(given.ids):
            p = original(ids[None]).logits[0].double().log_softmax(-1)
            q = other(ids[None]).logits[0].double().log_softmax(-1)
            for position in range(len(ids) - 1):
                kl.append(float((p[position].exp() * (p[position] - q[position])).sum()))
                tv.append(float((p[position].exp() - q[position].exp()).abs().sum()) / 2)
                nll.append(-float(q[position, ids[position + 1]]))
                same.append(int(p[position].argmax()) == int(q[position].argmax()))
                window.append(index)
    np.testing.assert_allclose(tokens.kl, kl, rtol=1e-9)
    np.testing.assert_allclose(tokens.tv, tv, rtol=1e-9)
    np.testing.assert_allclose(tokens.nll_result, nll, rtol=1e-9)
    assert tokens.same_top1.tolist() == same
    assert tokens.window.tolist() == window

    found = fidelity_measurements(tokens)
    paired, result = by_metric(found), by_metric(found, "result")
    assert paired["kl.mean"].value == pytest.approx(np.mean(kl), rel=1e-9)
    assert paired["kl.mean"].count == 38
    assert paired["kl.median"].value == pytest.approx(np.median(kl), rel=1e-9)
    assert paired["kl.max"].value == pytest.approx(max(kl), rel=1e-9)
    assert paired["tv.mean"].value == pytest.approx(np.mean(tv), rel=1e-9)
    assert paired["top1.agreement"].value == pytest.approx(100 * np.mean(same))
    assert result["perplexity"].value == pytest.approx(math.exp(np.mean(nll)), rel=1e-9)
    ratio = result["perplexity"].value / by_metric(found, "original")["perplexity"].value
    assert paired["perplexity.ratio"].value == pytest.approx(ratio, rel=1e-9)


def test_swapping_the_models_inverts_the_ratio_and_keeps_the_agreement(
    original: torch.nn.Module, other: torch.nn.Module
) -> None:
    there = by_metric(fidelity_measurements(compare_logits(original, other, windows(50), Silent())))
    back = by_metric(fidelity_measurements(compare_logits(other, original, windows(50), Silent())))
    assert there["perplexity.ratio"].value == pytest.approx(1 / back["perplexity.ratio"].value)
    assert there["top1.agreement"].value == back["top1.agreement"].value
    assert there["tv.mean"].value == pytest.approx(back["tv.mean"].value, rel=1e-12)
    assert there["kl.mean"].value != back["kl.mean"].value


@pytest.mark.parametrize(("special", "expected"), [(0, 9), (1, 9), (2, 8)])
def test_special_ids_are_context_and_the_first_real_id_needs_one(
    original: torch.nn.Module, special: int, expected: int
) -> None:
    given = windows(10, special=special)
    tokens = compare_logits(original, original, given, Silent())
    assert len(tokens.kl) == expected
    with torch.inference_mode():
        log_p = original(given.ids[0][None]).logits[0].log_softmax(-1)
    assert tokens.nll_original[-1] == pytest.approx(-float(log_p[8, given.ids[0][9]]), rel=1e-5)


def test_small_portions_change_nothing(
    original: torch.nn.Module, other: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compare_logits(original, other, windows(50), Silent())
    monkeypatch.setattr(fidelity, "WIDE_BYTES", 3 * 8 * 256 * fidelity.WIDE_COPIES)
    parts = compare_logits(original, other, windows(50), Silent())
    assert parts.rows() == whole.rows()


def test_rows_are_plain_data_by_window_and_lose_nothing(original: torch.nn.Module, other: torch.nn.Module) -> None:
    tokens = compare_logits(original, other, windows(9, 1, 30), Silent())
    rows = json.loads(json.dumps(tokens.rows()))
    assert [(row["kind"], row["window"], len(row["kl"])) for row in rows] == [("fidelity", 0, 8), ("fidelity", 2, 29)]
    for name in ("kl", "tv", "nll_original", "nll_result", "same_top1"):
        assert [value for row in rows for value in row[name]] == getattr(tokens, name).tolist()
    assert {row["kind"] for row in tokens.rows("floor")} == {"floor"}


@pytest.mark.parametrize("broken", ["original", "result"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_logits_name_model_and_window(
    original: torch.nn.Module, tmp_path: Path, broken: str, value: float
) -> None:
    """One poisoned embedding row breaks the window that holds its token, from that position on."""
    given = windows(20, 20)
    victim = load(tiny_llama(tmp_path))
    row = next(int(id_) for id_ in given.ids[1] if id_ not in given.ids[0])
    position = given.ids[1].tolist().index(row)
    with torch.no_grad():
        victim.get_input_embeddings().weight[row] = value
    pair = (victim, original) if broken == "original" else (original, victim)
    with pytest.raises(BrokenResultError, match=rf"{broken} .*window 1, position {position}$"):
        compare_logits(*pair, given, Silent())


def test_another_vocabulary_is_refused(original: torch.nn.Module, tmp_path: Path) -> None:
    wide = load(tiny_llama(tmp_path, vocab_size=260))
    with pytest.raises(BrokenResultError, match="256 tokens and the result 260"):
        compare_logits(original, wide, windows(5), Silent())


def test_other_dtypes_and_empty_text_are_refused(original: torch.nn.Module, tmp_path: Path) -> None:
    half = load(tiny_llama(tmp_path)).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"result is torch\.bfloat16"):
        compare_logits(original, half, windows(5), Silent())
    with pytest.raises(UsageError, match="nothing to predict"):
        compare_logits(original, original, windows(1, 1), Silent())


def random_tokens(count: int, per_window: int = 64) -> FidelityTokens:
    rng = np.random.default_rng(3)
    nll = rng.exponential(3.0, count)
    return FidelityTokens(
        kl=rng.exponential(0.1, count),
        tv=rng.random(count),
        nll_original=nll,
        nll_result=nll + rng.normal(0.05, 0.2, count),
        same_top1=rng.random(count) < 0.9,
        window=np.arange(count) // per_window,
    )


@pytest.mark.parametrize(("metric", "p", "needed"), [("kl.p99", 0.99, 299), ("kl.p999", 0.999, 2995)])
def test_a_percentile_needs_enough_tokens(metric: str, p: float, needed: int) -> None:
    short = by_metric(fidelity_measurements(random_tokens(needed - 1)))[metric]
    assert short.value is None
    assert short.note is not None
    assert str(needed) in short.note
    tokens = random_tokens(needed)
    carried = by_metric(fidelity_measurements(tokens))[metric]
    assert carried.value == np.quantile(tokens.kl, p)
    assert carried.interval is not None


def test_levels_seed_and_pairing() -> None:
    tokens = random_tokens(4096)
    found = fidelity_measurements(tokens, levels=(0.8,), seed=5, conditions={"device": "cpu"})
    assert found == fidelity_measurements(tokens, levels=(0.8,), seed=5, conditions={"device": "cpu"})
    largest = by_metric(found)["kl.max"]
    assert (largest.value, largest.interval, largest.one_sided) == (tokens.kl.max(), None, {})
    for one in found:
        if one is largest:
            continue
        assert set(one.one_sided) == {0.8, 0.95}
        assert one.interval is not None
        assert one.interval.low <= one.one_sided[0.95][0] <= one.one_sided[0.8][0] <= one.value
        assert one.value <= one.one_sided[0.8][1] <= one.one_sided[0.95][1] <= one.interval.high
        assert one.conditions == {"device": "cpu", "windows": 64}
    ratio, result = by_metric(found)["perplexity.ratio"], by_metric(found, "result")["perplexity"]
    assert ratio.interval is not None
    assert result.interval is not None
    relative = (result.interval.high - result.interval.low) / result.value
    assert ratio.interval.high - ratio.interval.low < 0.3 * relative
    assert found != fidelity_measurements(tokens, levels=(0.8,), seed=6, conditions={"device": "cpu"})
