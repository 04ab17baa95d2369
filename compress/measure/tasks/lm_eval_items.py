"""What the items of an lm-eval task hold, and whether they can be asked: told before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.errors import UsageError

_LISTED = 5

Right = int | str | tuple[str, ...]
"""Index of the right choice, the right text, or several texts of which each is right."""


def check_settings(name: str, tasks: Sequence[Any], *, fewshot: int | None, metric: str | None) -> None:
    """Sets the number of examples, and refuses what the tasks of `name` cannot do.

    Args:
        tasks: of lm-eval, loaded with their data.
        fewshot: examples before each item; None takes what the task says.

    Raises:
        UsageError: a metric that a task lacks, more examples than there are, or items without a right answer.
    """
    for task in tasks:
        known = list(task.aggregation())
        if metric is not None and metric not in known:
            raise UsageError(f"the task {task.task_name} has no metric {metric!r}; it has {', '.join(known)}")
        _set_fewshot(name, task, fewshot)
        _check_answers(name, task)


def right_of(task: Any, doc: Mapping[str, Any]) -> tuple[Right, Sequence[str]]:
    """What is right, and the choices: an index of them where exactly one is right, texts where several are."""
    choices = list(task.doc_to_choice(doc)) if task.OUTPUT_TYPE == "multiple_choice" else []
    # With several contexts (Winogrande) the text is the index and the target is what follows each of them.
    contexts = bool(choices) and bool(getattr(task, "multiple_input", False))
    right = task.doc_to_text(doc) if contexts else task.doc_to_target(doc)
    if isinstance(right, str) and right in choices:
        right = choices.index(right)
    if isinstance(right, list):
        places = range(len(choices))
        texts = (str(choices[one]) if isinstance(one, int) and one in places else str(one) for one in right)
        return tuple(texts), choices
    return (right if isinstance(right, int) and 0 <= right < len(choices) else str(right)), choices


def expected_text(right: Right, choices: Sequence[str]) -> str:
    if isinstance(right, int):
        return choices[right]
    return right if isinstance(right, str) else " | ".join(right)


def _set_fewshot(name: str, task: Any, fewshot: int | None) -> None:
    own = task.get_config("num_fewshot") or 0
    if task.get_config("num_fewshot") == 0 and fewshot:
        raise UsageError(f"{name}: the task {task.task_name} takes no examples; remove `fewshot`")
    wanted = own if fewshot is None else fewshot
    if wanted:
        there = len(list(task.fewshot_docs()))
        if wanted > there - _shares_items(task):
            raise UsageError(
                f"{name}: {task.task_name} wants {wanted} examples before each item and has {there} to take them from",
                hint="lower `fewshot`, or `num_fewshot` in the task's file",
            )
    task.set_config(key="num_fewshot", value=wanted)


def _shares_items(task: Any) -> bool:
    """Whether examples come from the items themselves; an item is never an example of itself."""
    fixed = getattr(getattr(task.config, "fewshot_config", None), "samples", None)
    split = getattr(task.config, "fewshot_split", None)
    own = {getattr(task.config, name, None) for name in ("test_split", "validation_split")}
    return fixed is None and (split is None or split in own)


def _check_answers(name: str, task: Any) -> None:
    """A right answer that is none of the choices makes both models look equally wrong, and nothing worse."""
    if task.OUTPUT_TYPE == "loglikelihood" and any(isinstance(task.doc_to_target(doc), list) for doc in task.eval_docs):
        raise UsageError(
            f"{name}: {task.task_name} has several right continuations for one item, and lm-eval scores one",
            hint="make `doc_to_target` one text, or the task `generate_until` with exact_match",
        )
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    from jinja2 import TemplateError

    faults = []
    for number, doc in enumerate(task.eval_docs):
        try:
            right, choices = right_of(task, doc)
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:  # a template of the task's
            faults.append(f"document {number} cannot be read ({type(error).__name__}: {str(error)[:100]})")
            continue
        if not isinstance(right, int) and not set([right] if isinstance(right, str) else right) <= set(choices):
            faults.append(f"document {number} has the right answer {expected_text(right, choices)[:60]!r}, no choice")
    if faults:
        more = f"\nand {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        raise UsageError(
            "\n".join(f"{name}: {task.task_name}: {fault}" for fault in faults[:_LISTED]) + more,
            hint="`doc_to_target` must give the index or the text of one of `doc_to_choice` for every document",
        )
