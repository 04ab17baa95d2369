from __future__ import annotations

import copy
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from compress.data.tasks import TaskSet, read_task
from compress.errors import BrokenResultError, UsageError
from compress.formats.rounded_inputs import round_inputs
from compress.measure.tasks.answers import TaskPairs
from compress.measure.tasks.prompts import Scoring, check_task, encode_pair, labels_of
from compress.measure.tasks.scoring import answer_task
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent

LABELS = {0: "bad", 1: "good", 2: "so so"}


def load(folder: Path) -> Any:
    return load_original(open_checkpoint(folder), dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny.tiny_llama(tmp_path_factory.mktemp("original")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny.tiny_llama(tmp_path_factory.mktemp("other"), seed=1))


@pytest.fixture(scope="module")
def writer(original: Any) -> Any:
    """A model whose greedy answers are letters, which decode to themselves."""
    model = copy.deepcopy(original)
    letters = set(tiny.byte_tokenizer().encode("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    model.lm_head.weight.data[[token for token in range(256) if token not in letters]] = 0
    return model


def classifier(seed: int, labels: dict[int, str] = LABELS) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256,
        max_position_embeddings=128, initializer_range=0.3, id2label=labels, label2id={v: k for k, v in labels.items()},
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double().eval()


def task(path: Path, rows: list[dict[str, Any]], **options: Any) -> TaskSet:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_task(str(file), **options)


def choices(path: Path, count: int = 6) -> TaskSet:
    rows = [
        {"question": text[:40], "choices": [one[: 8 + 9 * at] for at, one in enumerate(tiny.sentences(4, seed=k + 9))]}
        for k, text in enumerate(tiny.sentences(count))
    ]
    return task(path, [row | {"answer": index % 4} for index, row in enumerate(rows)])


def answered(original: Any, result: Any, items: TaskSet, **options: Any) -> TaskPairs:
    return answer_task(original, result, tiny.byte_tokenizer(), items, Scoring(**options), Silent())


def slow_loglikelihood(model: Any, context: str, continuation: str) -> float:
    """One token at a time, each from a run over all before it."""
    ids, total = list(tiny.byte_tokenizer().encode(context)), 0.0
    for token in tiny.byte_tokenizer().encode(continuation):
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        total += float(logits.log_softmax(-1)[token])
        ids.append(token)
    return total


@pytest.mark.parametrize("metric", ["acc", "acc_norm"])
def test_choices_against_a_slow_reference(metric: Any, original: Any, other: Any, tmp_path: Path) -> None:
    items = choices(tmp_path)
    found = answered(original, other, items, metric=metric, prompt="Q: {question}")
    assert (found.metric, found.kind, found.chance, found.sha256) == (metric, "multiple_choice", 0.25, items.sha256)
    for item, pair in zip(items.items, found.items, strict=True):
        for model, answer in ((original, pair.original), (other, pair.result)):
            logs = [slow_loglikelihood(model, f"Q: {item.question}", f" {choice}") for choice in item.choices]
            assert answer.loglikelihoods == pytest.approx(logs, abs=1e-9)
            scores = logs if metric == "acc" else [a / len(b) for a, b in zip(logs, item.choices, strict=True)]
            chosen = scores.index(max(scores))
            assert answer.answer == item.choices[chosen]
            assert answer.correct == (chosen == item.answer)
            right = scores[int(item.answer)]  # type: ignore[arg-type]
            assert answer.probability == pytest.approx(1 / sum(math.exp(one - right) for one in scores))
            wrong = max(one for index, one in enumerate(scores) if index != item.answer)
            assert answer.margin == pytest.approx(right - wrong)
    assert all(pair.original.margin != pair.result.margin for pair in found.items), "two different models"


@pytest.mark.parametrize(
    "name",
    ["mistral", "qwen2", "qwen3", "smollm3", "olmo2", "phi3", "gpt_neox", "gemma", "gemma2", "gemma3", "opt", "gpt2"],
)
def test_every_architecture_scores_as_without_a_cache(name: str, tmp_path: Path) -> None:
    """Contexts longer than the sliding windows of 32 too."""
    model = load(getattr(tiny, f"tiny_{name}")(tmp_path / "m"))
    items = choices(tmp_path, 2)
    for item, pair in zip(items.items, answered(model, model, items).items, strict=True):
        logs = [slow_loglikelihood(model, item.question, f" {choice}") for choice in item.choices]
        assert pair.original.loglikelihoods == pytest.approx(logs, abs=1e-9)
        assert pair.original == pair.result


def test_batches_of_few_choices_change_nothing(original: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answered(original, original, choices(tmp_path))
    monkeypatch.setattr("compress.measure.tasks.scoring.LOGIT_BYTES", 1)
    apart = answered(original, original, choices(tmp_path))
    for one, another in zip(whole.items, apart.items, strict=True):
        assert one.original.loglikelihoods == pytest.approx(another.original.loglikelihoods, abs=1e-9)


def test_a_result_that_rounds_its_inputs_answers_too(original: Any, tmp_path: Path) -> None:
    """W8A8: hooks round each token on its own, so cache and padding cannot reach another token. What differs in the
    last bit may be rounded to another code, hence the tolerance."""
    rounded = copy.deepcopy(original)
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(partial(round_inputs, values="int"))
    items = choices(tmp_path, 3)
    found = answered(original, rounded, items)
    for item, pair in zip(items.items, found.items, strict=True):
        logs = [slow_loglikelihood(rounded, item.question, f" {choice}") for choice in item.choices]
        assert pair.result.loglikelihoods == pytest.approx(logs, rel=2e-3)
        assert pair.result.loglikelihoods != pair.original.loglikelihoods


def greedy(model: Any, text: str, count: int) -> str:
    ids = tiny.byte_tokenizer().encode(text)
    start = len(ids)
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return str(tiny.byte_tokenizer().decode(ids[start:]))


def test_cloze_is_right_if_greedy_decoding_goes_on_with_it(writer: Any, other: Any, tmp_path: Path) -> None:
    questions = ["The king of the", "A small green stone by"]
    rows = [{"question": one, "answer": greedy(writer, one, 5)} for one in questions]
    items = task(tmp_path, [*rows, {"question": questions[0], "answer": "water"}], kind="cloze")
    found = answered(writer, other, items, delimiter="")
    assert [pair.original.correct for pair in found.items] == [True, True, False]
    assert (found.metric, found.chance) == ("acc", None)
    for item, pair in zip(items.items, found.items, strict=True):
        log = slow_loglikelihood(other, item.question, str(item.answer))
        assert pair.result.loglikelihoods == (pytest.approx(log, abs=1e-9),)
        assert pair.result.correct == (greedy(other, item.question, len(item.expected)) == item.answer)


def test_generated_answers_are_cut_stripped_and_compared(writer: Any, other: Any, tmp_path: Path) -> None:
    text = greedy(writer, "The river", 12)
    stop = text[6]
    before = text[: text.index(stop)].strip()
    rows = [
        {"question": "The river", "answer": [f" {before} ", "another"]},
        {"question": "The river", "answer": "another"},
    ]
    assert before
    found = answered(writer, other, task(tmp_path, rows), new_tokens=12, stop=(stop, "never seen"))
    assert [pair.original.correct for pair in found.items] == [True, False]
    assert found.items[0].original.answer == before
    assert found.items[0].expected == f" {before}  | another"
    whole = answered(writer, writer, task(tmp_path, rows), new_tokens=12, stop=())
    assert whole.items[0].original.answer == text.strip()


@pytest.mark.parametrize("ends", [None, "int", "list"])
def test_end_ids_may_be_missing_one_or_several(ends: str | None, writer: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(writer)
    third = tiny.byte_tokenizer().encode(greedy(writer, "A city", 3))[2]
    model.config.eos_token_id = {None: None, "int": third, "list": [3, third]}[ends]
    found = answered(model, model, task(tmp_path, [{"question": "A city", "answer": "x"}] * 2), stop=(), new_tokens=3)
    expected = greedy(writer, "A city", 3)
    assert found.items[0].original.answer == (expected if ends is None else expected[: expected.index(expected[2])])


def test_classification_against_a_plain_forward_pass(tmp_path: Path) -> None:
    rows = [{"text": text[:90], "label": index % 3} for index, text in enumerate(tiny.sentences(4))]
    items = task(tmp_path, [*rows, {"text": "Rain.", "text_pair": "Sun.", "label": "so so"}])
    one, two = classifier(0), classifier(1)
    found = answered(one, two, items)
    assert (found.kind, found.metric, found.chance) == ("classification", "acc", pytest.approx(1 / 3))
    for item, pair in zip(items.items, found.items, strict=True):
        ids = tiny.byte_tokenizer()(item.question, item.pair)["input_ids"]
        with torch.inference_mode():
            logs = two(torch.tensor([ids])).logits[0].log_softmax(-1).tolist()
        assert pair.result.loglikelihoods == pytest.approx(logs, abs=1e-9)
        assert pair.result.answer == LABELS[logs.index(max(logs))]
        assert pair.expected == LABELS[int(pair.gold)]  # type: ignore[arg-type]
        assert pair.result.probability == pytest.approx(math.exp(logs[int(pair.gold)]))  # type: ignore[arg-type]
    assert found.items[-1].question == "Rain.\nSun."


def test_kinds_and_heads_have_to_fit(original: Any, tmp_path: Path) -> None:
    labels = task(tmp_path, [{"text": "a", "label": 0}] * 2)
    with pytest.raises(UsageError, match=r"needs a model with such a head.*LlamaForCausalLM"):
        answered(original, original, labels)
    with pytest.raises(UsageError, match="needs a model that predicts tokens; this one is BertFor"):
        answered(classifier(0), classifier(0), choices(tmp_path))
    unknown = task(tmp_path, [{"text": "a", "label": "great"}, {"text": "a", "label": 7}])
    with pytest.raises(UsageError) as caught:
        answered(classifier(0), classifier(0), unknown)
    assert "item 1 has the label 'great'; the model has bad, good, so so" in str(caught.value)
    assert "item 2 has the label 7" in str(caught.value)
    assert labels_of({}) == {0: "LABEL_0", 1: "LABEL_1"}
    assert labels_of({"id2label": {"0": "x", "1": "y", "2": "z"}}) == {0: "x", 1: "y", 2: "z"}


def test_items_longer_than_the_model_are_all_named_before_anything_runs(original: Any, tmp_path: Path) -> None:
    rows = [{"question": "x" * (126 - length), "choices": ["a", "b" * length], "answer": 0} for length in (2, 3)]
    fits = task(tmp_path, rows)  # question, space and choice: 129 tokens, of which the last is never read
    assert answered(original, original, fits).losses == 0
    longer = task(tmp_path, [row | {"question": row["question"] + "xyz"} for row in rows] * 4)
    config = original.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(UsageError) as caught:
        check_task(longer, tiny.byte_tokenizer(), Scoring(), config)
    assert "item 1 needs 129 positions; the model has 128" in str(caught.value)
    assert "and 3 more items" in str(caught.value)
    written = task(tmp_path, [{"question": "x" * 100, "answer": "y"}] * 2)
    with pytest.raises(UsageError, match="needs 132 positions"):
        check_task(written, tiny.byte_tokenizer(), Scoring(), config)
    assert check_task(written, tiny.byte_tokenizer(), Scoring(new_tokens=28), config)


@pytest.mark.parametrize("which", ["original", "result"])
def test_logits_that_are_not_finite_name_model_task_and_item(which: str, original: Any, tmp_path: Path) -> None:
    broken = copy.deepcopy(original)
    broken.lm_head.weight.data[5] = math.nan
    models = (broken, original) if which == "original" else (original, broken)
    for items in (choices(tmp_path), task(tmp_path, [{"question": "a", "answer": "b"}] * 2)):
        with pytest.raises(BrokenResultError, match=f"of the {which} model are not finite in task rows, item 1"):
            answered(*models, items)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"prompt": "no place"}, "must hold {question}"),
        ({"metric": "acc_nrom"}, "acc or acc_norm"),
        ({"new_tokens": 0}, "at least 1"),
        ({"stop": ("",)}, "no stop may be empty"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], rule: str, original: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rule):
        answered(original, original, choices(tmp_path), **options)


def test_braces_and_odd_characters_in_a_question_stay_as_they_are(original: Any, tmp_path: Path) -> None:
    odd = "{0} {x!r} %s \x00 \x1b[31m {question} \u202e"
    rows = [{"question": odd, "choices": ["{a}", "b"], "answer": 0}] * 2
    found = answered(original, original, task(tmp_path, rows), prompt="<{question}> {")
    assert found.items[0].question == odd
    log = slow_loglikelihood(original, f"<{odd}> {{", " {a}")
    assert found.items[0].original.loglikelihoods[0] == pytest.approx(log, abs=1e-9)


def test_spaces_move_and_bos_is_not_doubled() -> None:
    plain, starting = tiny.byte_tokenizer(), tiny.byte_tokenizer(bos_token="Ā")
    assert encode_pair(plain, "ab  ", "cd") == (plain.encode("ab"), plain.encode("  cd"))
    bos = starting.bos_token_id
    assert bos is not None
    context, continuation = encode_pair(starting, "ab", " c")
    assert (context, continuation) == (starting.encode("ab"), plain.encode(" c"))


def test_the_tokenizer_is_left_as_it_is(original: Any, tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(max_length=4)
    before = tokenizer.backend_tokenizer.to_str()
    answer_task(original, original, tokenizer, choices(tmp_path, 2), Scoring(), Silent())
    assert tokenizer.backend_tokenizer.to_str() == before
