"""Tasks of lm-eval, answered by two models in memory through lm-eval's Python API, item by item.

Both models get the same requests one at a time. lm-eval's response cache (`use_cache`) is never on: its key is the
request without the model, so the second model would be given the answers of the first.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compress.data.tasks import TaskKind
from compress.errors import UsageError
from compress.measure.tasks.answers import ItemAnswer, ItemPair, TaskPairs, decided
from compress.measure.tasks.lm_eval_check import LmEvalTasks, quiet
from compress.measure.tasks.lm_eval_items import expected_text, right_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compress.progress import Progress

PREFERRED = ("acc_norm", "acc", "exact_match")
_KINDS: Mapping[str, TaskKind] = {"multiple_choice": "multiple_choice", "loglikelihood": "cloze"}
_FEWSHOT_SEED = 1234  # lm-eval's own, so that its figures can be compared


def answer_lm_eval(
    original: PreTrainedModel,
    result: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checked: LmEvalTasks,
    name_or_file: str,
    *,
    items: int | None = None,
    metric: str | None = None,
    progress: Progress,
) -> list[TaskPairs]:
    """Both models' answers to one name or file of `checked`; a group gives several tasks.

    Args:
        items: at most so many of each task: those whose content has the smallest SHA-256.
        metric: a metric of the task that is 0 or 1 for each item; None takes acc_norm, acc, exact_match or the first.

    Raises:
        UsageError: no such metric or none that is 0 or 1, or requests longer than the model has positions for.
        BrokenResultError: the logits of a model are not finite.
    """
    tasks = checked.tasks[name_or_file]
    samples: dict[str, tuple[list[Any], list[Any]]] = {}
    with quiet(trusted=checked.trusted), progress.phase(f"task {name_or_file}", 2 * len(tasks)) as advance:
        for task in tasks:
            chosen = _sampled(task, items)
            both = [
                _samples(task, model, tokenizer, side, chosen, checked.trusted, advance)
                for model, side in ((original, "original"), (result, "result"))
            ]
            samples[task.task_name] = (both[0], both[1])
        return [_pairs(task, *samples[task.task_name], metric, name_or_file) for task in tasks]


def _sampled(task: Any, items: int | None) -> list[int] | None:
    """Indices of the items with the smallest hashes, ascending, as lm-eval goes through them; None for all."""
    docs = task.eval_docs
    if items is None or items >= len(docs):
        return None
    hashes = [
        hashlib.sha256(json.dumps(doc, sort_keys=True, default=str).encode("utf-8", "replace")).hexdigest()
        for doc in docs
    ]
    return sorted(sorted(range(len(hashes)), key=hashes.__getitem__)[:items])


def _samples(
    task: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    side: str,
    chosen: list[int] | None,
    trusted: bool,
    advance: Callable[[float], None],
) -> list[Any]:
    """lm-eval's samples of one task and one model."""
    import lm_eval

    from compress.measure.tasks.lm_eval_model import WholeItems

    count, done = max(1, len(task.eval_docs) if chosen is None else len(chosen)), 0.0

    def ran() -> None:
        nonlocal done
        step = min(1 / count, 1 - done)  # one request or several for each item
        done += step
        advance(step)

    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)
    task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    found = lm_eval.evaluate(
        lm=WholeItems(model, tokenizer, side, ran),
        task_dict={"tasks": {task.task_name: task}},
        samples=None if chosen is None else {task.task_name: chosen},
        bootstrap_iters=0,
        log_samples=True,
        confirm_run_unsafe_code=trusted,
    )
    advance(1 - done)
    samples: list[Any] = found["samples"][task.task_name]
    return samples


def _pairs(task: Any, before: Sequence[Any], after: Sequence[Any], metric: str | None, source: str) -> TaskPairs:
    filter_name, decides = _deciding(task, before, after, metric)
    both = [
        (one, other)
        for one, other in zip(before, after, strict=True)
        if one["filter"] == other["filter"] == filter_name and one["doc_id"] == other["doc_id"]
    ]
    hashes = "".join(one["doc_hash"] for one, _ in both)
    return TaskPairs(
        name=task.task_name,
        kind=_KINDS.get(task.OUTPUT_TYPE, "exact_match"),
        metric=decides if filter_name == "none" else f"{decides},{filter_name}",
        source=source,
        items=tuple(_item(task, one, other, decides) for one, other in both),
        sha256=hashlib.sha256(hashes.encode()).hexdigest(),
    )


def _deciding(task: Any, before: Sequence[Any], after: Sequence[Any], metric: str | None) -> tuple[str, str]:
    """The filter and the metric that say what is right: the first that is 0 or 1 for every item of both models."""
    filters = list(dict.fromkeys(sample["filter"] for sample in before))
    known = list(before[0]["metrics"])
    wanted = [metric] if metric else [*(one for one in PREFERRED if one in known), *known]
    for name in wanted:
        for filter_name in filters:
            values = [sample.get(name) for sample in (*before, *after) if sample["filter"] == filter_name]
            if all(_binary(value) for value in values):
                return filter_name, name
    raise UsageError(
        f"the task {task.task_name} has no metric that is 0 or 1 for each item; it has {', '.join(known)}",
        hint="choose a task with right and wrong answers",
    )


def _binary(value: Any) -> bool:
    return isinstance(value, bool | int | float | np.number | np.bool_) and float(value) in (0.0, 1.0)


def _item(task: Any, before: Mapping[str, Any], after: Mapping[str, Any], metric: str) -> ItemPair:
    doc = before["doc"]
    asked = task.doc_to_text(doc)
    gold, choices = right_of(task, doc)
    return ItemPair(
        id=str(before["doc_id"]),
        question=asked if isinstance(asked, str) else str(before["arguments"][0][0]),
        expected=expected_text(gold, choices),
        gold=gold,
        original=_answer(task, before, metric, gold, choices),
        result=_answer(task, after, metric, gold, choices),
        chance=1 / len(choices) if choices and isinstance(gold, int) else None,
    )


def _answer(
    task: Any, sample: Mapping[str, Any], metric: str, gold: int | str | tuple[str, ...], choices: Sequence[str]
) -> ItemAnswer:
    correct, responses = bool(sample[metric]), sample["filtered_resps"]
    if task.OUTPUT_TYPE == "loglikelihood":
        loglikelihood, greedy = responses[0]
        return ItemAnswer(
            correct, expected_text(gold, choices).strip() if greedy else "(something else)", (float(loglikelihood),)
        )
    if not choices:
        text = responses[0] if isinstance(responses[0], str) else str(responses[0])
        return ItemAnswer(correct, text.strip())
    found = [float(one[0]) for one in responses]
    lengths = {"acc_norm": [len(one) for one in choices], "acc_bytes": [len(one.encode()) for one in choices]}
    scores = [one / max(1, length) for one, length in zip(found, lengths.get(metric, [1] * len(choices)), strict=False)]
    if not isinstance(gold, int):
        return ItemAnswer(correct, choices[scores.index(max(scores))], tuple(found[: len(choices)]))
    return replace(decided(found[: len(choices)], scores, gold, choices), correct=correct)
