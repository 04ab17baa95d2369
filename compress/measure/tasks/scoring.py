"""Two models answer the items of a task: the same tokens, in the same batches, both in the dtype they are given in.

Choices and the answers of a cloze are scored by their log-likelihood after the context, as lm-eval does: the sum over
the continuation's tokens of log p(token | all before). The context runs once through each model; its keys and values
serve all choices, which follow as one batch, padded on the right, where padding can change no token before it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.data.tasks import TaskItem, TaskSet
from compress.errors import BrokenResultError
from compress.measure.tasks.answers import ItemAnswer, ItemPair, TaskPairs, decided
from compress.measure.tasks.prompts import Encoded, Scoring, check_task, label_index, labels_of
from compress.records import ORIGINAL, RESULT

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compress.progress import Progress

LOGIT_BYTES = 500_000_000
"""Logits alive at one time: long choices over a large vocabulary run in several batches."""


@dataclass(frozen=True)
class _Asked:
    """One item, as it is put to both models.

    Attributes:
        labels: of a classifier, by index. ends: ids that end a generated answer.
    """

    task: TaskSet
    item: TaskItem
    ids: Encoded
    scoring: Scoring
    tokenizer: PreTrainedTokenizerBase
    labels: Mapping[int, str]
    ends: frozenset[int]


def answer_task(
    original: PreTrainedModel,
    result: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskSet,
    scoring: Scoring,
    progress: Progress,
) -> TaskPairs:
    """Both models' answers to every item.

    Args:
        original, result: in eval mode, on one device, in one dtype.

    Raises:
        UsageError: see `check_task`.
        BrokenResultError: the logits of a model are not finite.
    """
    config = original.config.to_dict() | {"architectures": [type(original).__name__]}
    encoded = check_task(task, tokenizer, scoring, config)
    tokenizer = copy.deepcopy(tokenizer)  # calling one switches off the truncation and padding in its file
    labels = labels_of(config) if task.kind == "classification" else {}
    ends = _end_ids(original, tokenizer)
    pairs = []
    with torch.inference_mode(), progress.phase(f"task {task.name}", len(task.items)) as advance:
        for item, ids in zip(task.items, encoded, strict=True):
            pairs.append(_pair(original, result, _Asked(task, item, ids, scoring, tokenizer, labels, ends)))
            advance(1)
    metric = {"multiple_choice": scoring.metric, "exact_match": "exact_match"}.get(task.kind, "acc")
    return TaskPairs(task.name, task.kind, metric, task.source, tuple(pairs), task.sha256)


def _pair(original: PreTrainedModel, result: PreTrainedModel, asked: _Asked) -> ItemPair:
    item, labels = asked.item, asked.labels
    answer = {"multiple_choice": _choose, "cloze": _follow, "exact_match": _write, "classification": _classify}
    label = label_index(item, labels) if labels else None
    options = len(item.choices) or len(labels)
    return ItemPair(
        id=item.id,
        question=item.question if item.pair is None else f"{item.question}\n{item.pair}",
        expected=item.expected if label is None else labels[label],
        gold=item.answer if label is None else label,
        original=answer[asked.task.kind](original, ORIGINAL, asked),
        result=answer[asked.task.kind](result, RESULT, asked),
        cluster=item.cluster,
        chance=1 / options if options else None,
    )


def _choose(model: PreTrainedModel, name: str, asked: _Asked) -> ItemAnswer:
    """Multiple choice: right if the right choice scores highest; the first of equals, as lm-eval has it."""
    found = [_score(logits, ids)[0] for logits, ids in _continuations(model, name, asked)]
    assert isinstance(asked.item.answer, int)
    lengths = [len(choice) if asked.scoring.metric == "acc_norm" else 1 for choice in asked.item.choices]
    scores = [one / length for one, length in zip(found, lengths, strict=True)]
    return decided(found, scores, asked.item.answer, asked.item.choices)


def _follow(model: PreTrainedModel, name: str, asked: _Asked) -> ItemAnswer:
    """Cloze: right if greedy decoding gives every token of the answer."""
    logits, ids = next(_continuations(model, name, asked))
    loglikelihood, greedy = _score(logits, ids)
    same = [one == other for one, other in zip(greedy, ids, strict=True)]
    # From the first other token on, what follows is no longer what the model would have written.
    shown = greedy if all(same) else greedy[: same.index(False) + 1]
    text = str(asked.tokenizer.decode(shown)).strip()
    return ItemAnswer(all(same), text, (loglikelihood,))


def _write(model: PreTrainedModel, name: str, asked: _Asked) -> ItemAnswer:
    """Exact match: greedy decoding up to a stop, an end id or `new_tokens`; white space around it does not count."""
    ids, written, text, memory = list(asked.ids.context), [], "", None
    for _ in range(asked.scoring.new_tokens):
        logits, memory = _run(model, name, asked, torch.tensor([ids], device=model.device), 1, memory)
        token = int(logits[0, -1].argmax())
        if token in asked.ends:
            break
        written.append(token)
        text = str(asked.tokenizer.decode(written, skip_special_tokens=True))
        if any(stop in text for stop in asked.scoring.stop):
            break
        ids = [token]
    text = text[: min([text.find(stop) for stop in asked.scoring.stop if stop in text], default=len(text))].strip()
    right = asked.item.answer if isinstance(asked.item.answer, tuple) else (str(asked.item.answer),)
    return ItemAnswer(text in {one.strip() for one in right}, text)


def _classify(model: PreTrainedModel, name: str, asked: _Asked) -> ItemAnswer:
    given = {"input_ids": asked.ids.context} | ({} if asked.ids.types is None else {"token_type_ids": asked.ids.types})
    inputs = {key: torch.tensor([value], device=model.device) for key, value in given.items()}
    logits = _finite(model(**inputs).logits, name, asked)[0]
    found = logits.log_softmax(dim=-1).tolist()
    labels = [asked.labels[index] for index in range(len(found))]
    return decided(found, found, label_index(asked.item, asked.labels), labels)


def _score(logits: Tensor, ids: tuple[int, ...]) -> tuple[float, list[int]]:
    """Log-likelihood of ids [T] under logits [T, V], and the most likely id at each position."""
    targets = torch.tensor(ids, device=logits.device)
    logs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)  # [T]
    return float(logs.cpu().double().sum()), logits.argmax(dim=-1).tolist()


def _continuations(model: PreTrainedModel, name: str, asked: _Asked) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The logits [T, V] that predict the tokens of each continuation, and these [T], in order."""
    *context, last = asked.ids.context
    shared = None
    if context:
        _, shared = _run(model, name, asked, torch.tensor([context], device=model.device), 1)
    longest = max(map(len, asked.ids.continuations))
    width = model.config.get_text_config().vocab_size * model.dtype.itemsize
    rows = max(1, LOGIT_BYTES // (longest * width))
    for start in range(0, len(asked.ids.continuations), rows):
        part = asked.ids.continuations[start : start + rows]
        length = max(map(len, part))
        inputs = torch.zeros((len(part), length), dtype=torch.int64)  # padded with 0, an id of every vocabulary
        for row, ids in enumerate(part):
            inputs[row, : len(ids)] = torch.tensor([last, *ids[:-1]])
        memory = copy.deepcopy(shared)
        if memory is not None:
            memory.batch_repeat_interleave(len(part))
        logits, _ = _run(model, name, asked, inputs.to(model.device), length, memory)
        for row, ids in enumerate(part):
            yield logits[row, : len(ids)], ids


def _run(
    model: PreTrainedModel, name: str, asked: _Asked, ids: Tensor, keep: int, memory: Any = None
) -> tuple[Tensor, Any]:
    """One forward pass of ids [batch, T] after what is in memory: the last `keep` logits [batch, keep, V], and the
    keys and values of all."""
    takes = inspect.signature(model.forward).parameters
    cache = "cache" if "cache" in takes else "past_key_values"  # models that bring their own code use the older name
    only = {"logits_to_keep": keep} if "logits_to_keep" in takes else {}
    output = model(input_ids=ids, use_cache=True, **{cache: memory}, **only)
    return _finite(output.logits[:, -keep:], name, asked), getattr(output, cache)


def _finite(logits: Tensor, name: str, asked: _Asked) -> Tensor:
    # A sum is not finite where any of its terms is not, and takes a tenth of the time of looking at each.
    if not bool(logits.sum(dim=-1).isfinite().all()):
        raise BrokenResultError(
            f"logits of the {name} model are not finite in task {asked.task.name}, item {asked.item.id}",
            hint="the weights overflow or hold NaN; check the layer errors of the report"
            if name == RESULT
            else "the original itself is broken; check its weights",
        )
    return logits


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end an answer, wherever they are written down: none, one or a list each."""
    found: set[int] = set()
    for place in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(place, "eos_token_id", None)
        found.update(one for one in (ids if isinstance(ids, list | tuple) else [ids]) if one is not None)
    return frozenset(found)
