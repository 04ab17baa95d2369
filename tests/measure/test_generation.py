from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny import tiny_gemma3, tiny_gpt2, tiny_llama, tiny_opt

from compress.data.windows import Windows
from compress.errors import BrokenResultError, UsageError
from compress.formats.rounded_inputs import round_inputs
from compress.measure.generation import (
    Generations,
    common_prefix,
    compare_generation,
    end_ids,
    generation_measurements,
    repeated_grams,
)
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent
from compress.records import Measurement

ASKED: dict[str, Any] = {"prompts": 3, "prompt": 8, "new_tokens": 20}


def windows(*lengths: int) -> Windows:
    generator = torch.Generator().manual_seed(7)
    ids = tuple(torch.randint(0, 256, (length,), generator=generator) for length in lengths)
    return Windows("random", ids, 0, max(lengths), sum(lengths), len(ids), len(ids), None, None, "0" * 64)


def load(folder: Path) -> torch.nn.Module:
    return load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")


def compared(original: torch.nn.Module, result: torch.nn.Module, *lengths: int, **asked: int) -> Generations:
    return compare_generation(original, result, windows(*lengths), **(ASKED | asked), progress=Silent())


def figures(found: Generations) -> dict[tuple[str, str], Measurement]:
    return {(one.metric, one.subject): one for one in generation_measurements(found)}


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3, tiny_gpt2, tiny_opt], ids=lambda make: make.__name__)
def test_answers_are_those_of_transformers_greedy(make: Any, tmp_path: Path) -> None:
    original, other = load(make(tmp_path / "a")), load(make(tmp_path / "b", seed=1))
    found = compared(original, other, 40, 40, 40, 40)
    for model, answers in ((original, found.original), (other, found.result)):
        prompts = torch.stack([ids[:8] for ids in windows(40, 40, 40).ids])
        greedy = transformers.GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0)
        expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=greedy)
        assert [list(answer) for answer in answers] == expected[:, 8:].tolist()


def test_a_model_with_rounded_inputs_writes_something_else(tmp_path: Path) -> None:
    """The pre hook that stands for W8A8 is called for the prompt and for every token."""
    original, result = load(tiny_llama(tmp_path)), load(tiny_llama(tmp_path))
    calls = []
    result.model.layers[0].mlp.up_proj.register_forward_pre_hook(partial(round_inputs, values="int"))
    result.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda _module, inputs: calls.append(inputs[0].shape))
    compared(original, result, 40, 40)
    assert calls == [(2, 8, 64)] + [(2, 1, 64)] * 19


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_an_answer_ends_with_its_first_end_token(where: str, as_list: bool, tmp_path: Path) -> None:
    model = load(tiny_llama(tmp_path))
    free = compared(model, model, 40, 40, 40).original
    end = free[0][6]
    model.generation_config.eos_token_id = None
    getattr(model, where).eos_token_id = [255, end] if as_list else end
    assert end_ids(model) == ({255, end} if as_list else {end})
    found = compared(model, model, 40, 40, 40)
    for answer, whole in zip(found.original, free, strict=True):
        first = next((place for place, token in enumerate(whole) if token in end_ids(model)), len(whole))
        assert answer == whole[: first + 1]
    assert len(found.original[0]) <= 7


def test_without_end_tokens_and_sampling_settings_all_answers_are_as_long_as_allowed(tmp_path: Path) -> None:
    model = load(tiny_llama(tmp_path))
    plain = compared(model, model, 40)
    model.generation_config.update(do_sample=True, temperature=9.0, repetition_penalty=5.0, max_new_tokens=3)
    assert compared(model, model, 40) == plain
    assert len(plain.original[0]) == 20
    assert end_ids(model) == frozenset()


def test_equal_models_never_part(tmp_path: Path) -> None:
    model = load(tiny_llama(tmp_path))
    found = figures(compared(model, model, 40, 40, 40))
    ratio = found["generation.length_ratio", "result/original"]
    assert (ratio.value, ratio.note) == (1.0, "3 answers of the original and 3 of the result are as long as allowed")
    divergence = found["generation.first_divergence", "result/original"]
    assert (divergence.value, divergence.count) == (20.0, 3)
    assert divergence.note == "3 of 3 answers never part and count with their length"
    assert found["generation.repetition", "original"].value == found["generation.repetition", "result"].value
    assert ratio.conditions == {"prompts": 3, "prompt": 8, "new_tokens": 20, "decoding": "greedy"}


def test_figures_by_hand() -> None:
    original = ((1, 2, 3, 4, 1, 2, 3, 4), (5, 6), (7, 8, 9, 7, 8, 9, 7, 8, 9, 7))
    result = ((1, 2, 3, 4, 9, 2), (6, 5, 4, 4, 4, 4, 4), (7, 8, 9, 7, 8, 9, 7, 8, 9, 7))
    found = figures(Generations(original, result, prompt=8, new_tokens=10))
    assert found["generation.length_ratio", "result/original"].value == 23 / 20
    assert found["generation.repetition", "original"].value == pytest.approx(100 * (1 + 0 + 4) / (5 + 0 + 7))
    assert found["generation.repetition", "result"].value == pytest.approx(100 * (0 + 1 + 4) / (3 + 4 + 7))
    assert found["generation.first_divergence", "result/original"].value == 4.0
    rows = json.loads(json.dumps(Generations(original, result, 8, 10).rows()))
    assert rows[1] == {"kind": "generation", "prompt": 1, "original": [5, 6], "result": [6, 5, 4, 4, 4, 4, 4]}


def test_short_answers_have_no_repetition_to_speak_of() -> None:
    missing = figures(Generations(((1, 2),), ((1, 2, 3),), 8, 10))["generation.repetition", "result"]
    assert (missing.value, missing.note) == (None, "no answer has 4 tokens")


@pytest.mark.parametrize(
    ("answer", "expected"), [((), (0, 0)), ((1,) * 4, (0, 1)), ((1,) * 7, (3, 4)), (tuple(range(9)), (0, 6))]
)
def test_repeated_grams(answer: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert repeated_grams(answer) == expected


@pytest.mark.parametrize(("b", "expected"), [((1, 2, 3), 3), ((1, 2, 4), 2), ((1, 2), 2), ((9,), 0)])
def test_common_prefix(b: tuple[int, ...], expected: int) -> None:
    assert common_prefix((1, 2, 3), b) == expected


def test_intervals_follow_the_prompts() -> None:
    rng = np.random.default_rng(0)
    answers = [tuple(rng.integers(0, 9, rng.integers(5, 30)).tolist()) for _ in range(40)]
    found = generation_measurements(Generations(tuple(answers[:20]), tuple(answers[20:]), 8, 30), levels=(0.9,))
    assert found == generation_measurements(Generations(tuple(answers[:20]), tuple(answers[20:]), 8, 30), levels=(0.9,))
    for one in found:
        assert one.value is not None
        assert one.interval is not None
        assert one.interval.low <= one.one_sided[0.95][0] <= one.value <= one.one_sided[0.9][1] <= one.interval.high


@pytest.mark.parametrize("broken", ["original", "result"])
def test_logits_that_are_not_finite_name_the_model(broken: str, tmp_path: Path) -> None:
    model, victim = load(tiny_llama(tmp_path)), load(tiny_llama(tmp_path))
    with torch.no_grad():
        victim.lm_head.weight[3] = float("nan")
    pair = (victim, model) if broken == "original" else (model, victim)
    with pytest.raises(BrokenResultError, match=f"{broken} model are not finite in prompt 0, at generated token 0"):
        compared(*pair, 40)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_opt], ids=lambda make: make.__name__)
def test_more_than_the_models_positions_is_refused(make: Any, tmp_path: Path) -> None:
    model = load(make(tmp_path))
    assert len(compared(model, model, 128, prompts=1, prompt=108).original[0]) == 20
    with pytest.raises(UsageError, match="129 positions; the model has 128"):
        compared(model, model, 128, prompt=109)


def test_short_windows_make_short_prompts(tmp_path: Path) -> None:
    model, said = load(tiny_llama(tmp_path)), []

    class Heard(Silent):
        def say(self, message: str) -> None:
            said.append(message)

    found = compare_generation(model, model, windows(5, 6, 6), **ASKED, progress=Heard())
    assert (found.prompt, len(found.original)) == (6, 2)
    assert said == ["Prompts are 6 tokens instead of 8: the windows of the text are no longer."]
