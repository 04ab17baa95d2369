"""The tokens of task items, cut into context and continuation exactly as lm-eval's HFLM does it.

    1. Spaces at the end of the context move to the start of the continuation.
    2. Context + continuation is tokenized whole; what lies beyond the tokens of the context alone is the continuation.
    3. Special tokens are what the tokenizer adds by default, none where the text starts with BOS (without one: EOS).

The pad token is never looked at; BOS and EOS may be missing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from compress.data.tasks import TaskItem, TaskSet
from compress.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = "{question}"
GENERATING, CLASSIFYING = ("ForCausalLM", "LMHeadModel"), "ForSequenceClassification"
_LISTED = 5


@dataclass(frozen=True)
class Scoring:
    """How items are asked and what counts as right.

    Attributes:
        metric: of multiple choice. acc: the choice of the largest log-likelihood; acc_norm: of the largest one divided
            by the choice's number of characters.
        prompt: what the model reads; `{question}` stands for the item's, nothing else is replaced.
        delimiter: between prompt and choice or answer, as lm-eval's target_delimiter.
        new_tokens, stop: most tokens of a generated answer, and the texts it ends before.
    """

    metric: Literal["acc", "acc_norm"] = "acc_norm"
    prompt: str = QUESTION
    delimiter: str = " "
    new_tokens: int = 32
    stop: tuple[str, ...] = ("\n",)


@dataclass(frozen=True)
class Encoded:
    """The token ids of one item.

    Attributes:
        context: what the model reads; [CLS] a [SEP] b [SEP] and the like for a classification.
        continuations: of each choice, or of the one answer of a cloze; none where the answer is generated.
        types: token_type_ids of the context, where the tokenizer gives them; for a classification.
    """

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...] = ()
    types: tuple[int, ...] | None = None

    def length(self, new_tokens: int) -> int:
        """Positions that are needed: the last token of a continuation is predicted and never read."""
        return len(self.context) + max((len(ids) - 1 for ids in self.continuations), default=new_tokens)


def check_task(
    task: TaskSet, tokenizer: PreTrainedTokenizerBase, scoring: Scoring, config: Mapping[str, Any]
) -> list[Encoded]:
    """All that can be told before weights are loaded. The items' tokens, for a model with the config.json `config`.

    Raises:
        UsageError: settings that cannot be, a model without the head that the kind of task needs, labels that it does
            not have, items without a token to predict, or longer than the model has positions for.
    """
    _check_settings(task, scoring)
    _check_head(task, config)
    labels = labels_of(config) if task.kind == "classification" else {}
    tokenizer = copy.deepcopy(tokenizer)  # calling one switches off the truncation and padding in its file
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    new_tokens = scoring.new_tokens if task.kind == "exact_match" else 0
    encoded, faults = [], []
    for item in task.items:
        try:
            encoded.append(_encoded(item, task, tokenizer, scoring))
            if task.kind == "classification":
                label_index(item, labels)
        except ValueError as error:
            faults.append(f"item {item.id} {error}")
            continue
        length = encoded[-1].length(new_tokens)
        if isinstance(positions, int) and length > positions:
            faults.append(f"item {item.id} needs {length} positions; the model has {positions}")
    if faults:
        more = f"\nand {len(faults) - _LISTED} more items at fault" if len(faults) > _LISTED else ""
        listed = "\n".join(f"task {task.name}: {fault}" for fault in faults[:_LISTED])
        raise UsageError(listed + more, hint="take these items out of the file, or shorten the prompt")
    return encoded


def labels_of(config: Mapping[str, Any]) -> dict[int, str]:
    """The names of a classifier's labels; transformers' defaults where config.json has none."""
    named = config.get("id2label")
    if isinstance(named, Mapping) and named:
        return {int(index): str(name) for index, name in named.items()}
    count = config.get("num_labels", 2)
    return {index: f"LABEL_{index}" for index in range(count if isinstance(count, int) else 2)}


def label_index(item: TaskItem, labels: Mapping[int, str]) -> int:
    """The index of an item's label; ValueError if the model has no such label."""
    if item.answer in labels:
        return int(str(item.answer))
    found = [index for index, name in labels.items() if name == item.answer]
    if not found:
        raise ValueError(f"has the label {item.answer!r}; the model has {', '.join(labels.values())}")
    return found[0]


def encode_context(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text with the special ones that the tokenizer adds by default (rule 3)."""
    prefix = prefix_id(tokenizer)
    starts = prefix is not None and text.startswith(str(tokenizer.decode([prefix])))
    options = {"add_special_tokens": False} if starts else {}
    ids: list[int] = tokenizer.encode(text, **options)
    return ids


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Context and continuation as token ids (rules 1 and 2)."""
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    ids = encode_context(tokenizer, bare)
    return ids, encode_context(tokenizer, bare + continuation)[len(ids) :]


def prefix_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """BOS, else EOS, else none; the first where the tokenizer has a list of them."""
    for found in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        ids = found if isinstance(found, list) else [found]
        if ids and ids[0] is not None:
            return int(ids[0])
    return None


def _check_settings(task: TaskSet, scoring: Scoring) -> None:
    if QUESTION not in scoring.prompt:
        raise UsageError(f"task {task.name}: the prompt {scoring.prompt!r} must hold {QUESTION}")
    if scoring.metric not in ("acc", "acc_norm"):
        raise UsageError(f"task {task.name}: the metric is {scoring.metric!r}; choices are judged by acc or acc_norm")
    if scoring.new_tokens < 1 or "" in scoring.stop:
        raise UsageError(f"task {task.name}: at least 1 new token is needed, and no stop may be empty")


def _check_head(task: TaskSet, config: Mapping[str, Any]) -> None:
    stated = config.get("architectures")
    name = str(stated[0]) if isinstance(stated, list | tuple) and stated else "none"
    if task.kind != "classification":
        if not name.endswith(GENERATING):
            raise UsageError(
                f"task {task.name} is {task.kind}, which needs a model that predicts tokens; this one is {name}",
                hint="an encoder takes classification tasks, rows of {text, label}",
            )
        return
    if not name.endswith(CLASSIFYING):
        raise UsageError(
            f"task {task.name} is classification, which needs a model with such a head (...{CLASSIFYING}); this one "
            f"is {name}",
            hint="a decoder takes multiple_choice tasks: write the labels as choices",
        )
    if config.get("problem_type") in ("regression", "multi_label_classification") or len(labels_of(config)) < 2:
        raise UsageError(f"task {task.name}: the model does not choose one of several labels; it cannot be right")


def _encoded(item: TaskItem, task: TaskSet, tokenizer: PreTrainedTokenizerBase, scoring: Scoring) -> Encoded:
    if task.kind == "classification":
        found = tokenizer(item.question, item.pair)
        types = found.get("token_type_ids")
        return Encoded(tuple(found["input_ids"]), types=None if types is None else tuple(types))
    prompt = scoring.prompt.replace(QUESTION, item.question)
    if task.kind == "exact_match":
        return _whole(Encoded(tuple(encode_context(tokenizer, prompt))))
    answers: Sequence[str] = item.choices or (str(item.answer),)
    pairs = [encode_pair(tokenizer, prompt, scoring.delimiter + answer) for answer in answers]
    return _whole(Encoded(tuple(pairs[0][0]), tuple(tuple(ids) for _, ids in pairs)))


def _whole(encoded: Encoded) -> Encoded:
    if not encoded.context:
        raise ValueError("has a prompt without any token")
    for index, ids in enumerate(encoded.continuations):
        if not ids:
            raise ValueError(f"has an answer without a token of its own (number {index})")
    return encoded
