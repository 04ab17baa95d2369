from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import tiny
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval_files import CHOICES, rows, write

from compress.data.tasks import read_task
from compress.errors import BrokenResultError, UsageError
from compress.measure.tasks.answers import TaskPairs
from compress.measure.tasks.lm_eval_check import check_lm_eval, quiet
from compress.measure.tasks.lm_eval_items import check_settings
from compress.measure.tasks.lm_eval_tasks import answer_lm_eval
from compress.measure.tasks.prompts import Scoring
from compress.measure.tasks.scoring import answer_task
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(folder: Path) -> Any:
    return load_original(open_checkpoint(folder), dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny.tiny_llama(tmp_path_factory.mktemp("original")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny.tiny_llama(tmp_path_factory.mktemp("other"), seed=1))


def answered(
    original: Any, result: Any, file: Path, tokenizer: Any = None, fewshot: int | None = None, **options: Any
) -> list[TaskPairs]:
    checked = check_lm_eval([str(file)])
    with quiet(trusted=False):
        check_settings(str(file), checked.tasks[str(file)], fewshot=fewshot, metric=options.get("metric"))
    return answer_lm_eval(
        original, result, tokenizer or tiny.byte_tokenizer(), checked, str(file), progress=Silent(), **options
    )


def reference(model: Any, tokenizer: Any, file: Path) -> dict[str, Any]:
    """lm-eval on its own, as its documentation has it."""
    with quiet(trusted=False):
        found: dict[str, Any] = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=1),
            tasks=[str(file)],
            task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
            bootstrap_iters=0,
            log_samples=True,
        )
    return found


@pytest.mark.parametrize("special", [{"eos_token": "Ā"}, {"bos_token": "Ā", "eos_token": "ā"}], ids=["eos", "bos"])
def test_our_scorer_agrees_with_lm_eval(special: dict[str, str], original: Any, other: Any, tmp_path: Path) -> None:
    """On one local task: the accuracies, and every log-likelihood of every item, to 1e-6."""
    file, tokenizer = write(tmp_path, "mine", rows(), **CHOICES), tiny.byte_tokenizer(**special)
    expected = [reference(model, tokenizer, file) for model in (original, other)]
    for metric in ("acc", "acc_norm"):
        items = read_task(str(tmp_path / "mine.jsonl"))
        ours = answer_task(original, other, tokenizer, items, Scoring(metric=metric), Silent())  # type: ignore[arg-type]
        theirs = answered(original, other, file, tokenizer, metric=metric)[0]
        for side, found in zip(("original", "result"), expected, strict=True):
            for pairs in (ours, theirs):
                answers = [getattr(pair, side) for pair in pairs.items]
                accuracy = sum(answer.correct for answer in answers) / len(answers)
                assert accuracy == pytest.approx(found["results"]["mine"][f"{metric},none"], abs=1e-12)
                for answer, sample in zip(answers, found["samples"]["mine"], strict=True):
                    logs = [float(response[0][0]) for response in sample["resps"]]
                    assert answer.loglikelihoods == pytest.approx(logs, abs=1e-6)
        assert [pair.original.answer for pair in ours.items] == [pair.original.answer for pair in theirs.items]
        assert [pair.result.probability for pair in ours.items] == pytest.approx(
            [pair.result.probability for pair in theirs.items]
        )
        assert (theirs.kind, theirs.metric, theirs.chance) == ("multiple_choice", metric, 0.25)
        assert [pair.gold for pair in theirs.items] == [pair.gold for pair in ours.items]


def test_spaces_at_the_end_of_a_prompt_agree_too(original: Any, tmp_path: Path) -> None:
    data = [row | {"question": row["question"] + "  "} for row in rows(3)]
    file = write(tmp_path, "spaces", data, **CHOICES)
    theirs = answered(original, original, file)[0]
    items = read_task(str(tmp_path / "spaces.jsonl"))
    ours = answer_task(original, original, tiny.byte_tokenizer(), items, Scoring(), Silent())
    for one, another in zip(ours.items, theirs.items, strict=True):
        assert one.original.loglikelihoods == pytest.approx(another.original.loglikelihoods, abs=1e-6)


def test_a_tokenizer_without_pad_bos_and_eos_is_served_and_left_alone(original: Any, tmp_path: Path) -> None:
    """H10; HFLM by itself gives such a tokenizer a pad token, and fails on the missing BOS."""
    tokenizer = tiny.byte_tokenizer()
    answered(original, original, write(tmp_path, "choice", rows(2), **CHOICES), tokenizer)
    generating = {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}"}
    stop = {"generation_kwargs": {"until": ["e"], "max_gen_toks": 8, "do_sample": False}}
    found = answered(original, original, write(tmp_path, "write", rows(2), **generating, **stop), tokenizer)[0]
    assert (found.kind, found.metric, found.chance) == ("exact_match", "exact_match", None)
    assert all("e" not in pair.original.answer for pair in found.items)
    assert tokenizer.pad_token_id is None
    assert len(tokenizer) == 256


def test_cloze_and_its_answers(original: Any, other: Any, tmp_path: Path) -> None:
    settings = {"output_type": "loglikelihood", "doc_to_text": "{{question}}", "doc_to_target": " {{choices[0]}}"}
    file = write(tmp_path, "cloze", rows(3), metric_list=[{"metric": "perplexity"}, {"metric": "acc"}], **settings)
    found = answered(original, other, file)[0]
    assert (found.kind, found.metric, found.chance) == ("cloze", "acc", None)
    assert all(len(pair.original.loglikelihoods) == 1 for pair in found.items)


def test_choices_that_are_contexts(original: Any, other: Any, tmp_path: Path) -> None:
    """As in Winogrande: the text is the index of the right context, and one target follows each of them."""
    contexts = {"doc_to_text": "{{answer}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{question}}"}
    file = write(tmp_path, "contexts", rows(6), **CHOICES | contexts | {"metric_list": [{"metric": "acc"}]})
    found = answered(original, other, file)[0]
    for pair, row in zip(found.items, rows(6), strict=True):
        assert (pair.gold, pair.expected) == (row["answer"], row["choices"][row["answer"]])
        for answer in (pair.original, pair.result):
            best = answer.loglikelihoods.index(max(answer.loglikelihoods))
            assert answer.correct == (best == pair.gold)
            assert answer.answer == row["choices"][best]
        assert row["choices"][0] in pair.question


def test_several_right_choices_have_no_margin(original: Any, tmp_path: Path) -> None:
    data = [row | {"answer": [0, 2]} for row in rows(4)]
    found = answered(original, original, write(tmp_path, "several", data, **CHOICES))[0]
    assert all(pair.original.margin is None and pair.original.probability is None for pair in found.items)
    assert found.chance is None
    assert all(
        pair.expected == f"{row['choices'][0]} | {row['choices'][2]}"
        for pair, row in zip(found.items, data, strict=True)
    )


def test_few_items_are_those_of_the_smallest_hashes(original: Any, tmp_path: Path) -> None:
    file = write(tmp_path, "mine", rows(8), **CHOICES)
    whole, some = answered(original, original, file)[0], answered(original, original, file, items=3)[0]
    by_id = {pair.id: pair for pair in whole.items}
    assert len(some.items) == 3
    assert all(by_id[pair.id] == pair for pair in some.items)
    assert {pair.id for pair in answered(original, original, file, items=2)[0].items} < {p.id for p in some.items}


def test_examples_before_an_item_are_the_same_for_both_models(original: Any, tmp_path: Path) -> None:
    short = [{"question": f"q{k}", "choices": ["a", "b"], "answer": k % 2} for k in range(6)]
    file = write(tmp_path, "few", short, fewshot_split="test", **CHOICES)
    with_examples, without = answered(original, original, file, fewshot=2)[0], answered(original, original, file)[0]
    assert all(pair.original == pair.result for pair in with_examples.items)
    assert with_examples.items[0].original.loglikelihoods != without.items[0].original.loglikelihoods
    never = write(tmp_path, "never", short, num_fewshot=0, **CHOICES)
    with pytest.raises(UsageError, match="takes no examples"):
        answered(original, original, never, fewshot=2)


def test_a_metric_that_the_task_lacks_or_that_is_no_0_or_1(original: Any, tmp_path: Path) -> None:
    file = write(tmp_path, "mine", rows(2), **CHOICES)
    with pytest.raises(UsageError, match="no metric 'f1'; it has acc, acc_norm"):
        answered(original, original, file, metric="f1")
    brier = CHOICES | {"metric_list": [{"metric": "brier_score"}]}
    with pytest.raises(UsageError, match="no metric that is 0 or 1"):
        answered(original, original, write(tmp_path, "brier", rows(2), **brier))


def test_requests_longer_than_the_model_are_refused_not_cut(original: Any, tmp_path: Path) -> None:
    calls = []
    hook = original.register_forward_pre_hook(lambda *_: calls.append(1))
    longer = [row | {"question": "x" * 140} for row in rows(3)]
    with pytest.raises(UsageError, match="12 of 12 requests of the task are longer than the 128 positions"):
        answered(original, original, write(tmp_path, "long", longer, **CHOICES))
    generating = {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "a"}
    with pytest.raises(UsageError, match="3 of 3 requests"):
        answered(original, original, write(tmp_path, "write", rows(3), **generating))
    hook.remove()
    assert not calls, "before anything runs"


@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until"])
def test_logits_that_are_not_finite_name_the_model(kind: str, original: Any, tmp_path: Path) -> None:
    broken = copy.deepcopy(original)
    broken.lm_head.weight.data[5] = math.nan
    settings = CHOICES if kind == "multiple_choice" else {
        "output_type": kind, "doc_to_text": "{{question}}", "doc_to_target": "a",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 4, "do_sample": False},
    }  # fmt: skip
    with pytest.raises(BrokenResultError, match="of the result model are not finite"):
        answered(original, broken, write(tmp_path, "mine", rows(2), **settings))


def test_nothing_is_printed_and_loggers_come_back(
    original: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    level, bar = logging.getLogger("lm_eval").level, lm_eval.api.task.tqdm
    file = write(tmp_path, "mine", rows(2), **CHOICES)
    capfd.readouterr()
    answered(original, original, file)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("lm_eval").level == level
    assert lm_eval.api.task.tqdm is bar
