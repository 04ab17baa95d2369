"""The result's answers against the original's: fidelity, tasks, generation, retrieval. All in float32, in pairs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compress.pipeline.pair import Pair
from compress.plan.tasks import PlannedTask
from compress.progress import Progress
from compress.records import Measurement, TaskRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.data.windows import Windows
    from compress.measure.tasks.answers import TaskPairs
    from compress.measure.tasks.lm_eval_check import LmEvalTasks

DOCUMENT_TOKENS = 256
"""What a document is cut to, where the folder does not say how long a text may be."""
Rows = list[dict[str, Any]]


@dataclass
class Answers:
    """What was found out, and the raw lines of samples.jsonl behind it."""

    measurements: list[Measurement] = field(default_factory=list)
    tasks: tuple[TaskRecord, ...] = ()
    rows: Rows = field(default_factory=list)

    def add(self, measurements: list[Measurement], rows: Rows) -> None:
        self.measurements += measurements
        self.rows += rows


def check_tasks(pair: Pair) -> LmEvalTasks | None:
    """Refuses, before a model is loaded, what lm-eval does not know and items that do not fit the model's positions.

    Returns:
        The tasks of lm-eval, with their data; None if there are none.
    """
    own = [planned for planned in pair.tasks if planned.items is not None]
    if own:
        from compress.measure.tasks.prompts import check_task
        from compress.model.load import load_tokenizer

        tokenizer = load_tokenizer(pair.original.folder, trust_remote_code=pair.trust_remote_code)
        for planned in own:
            assert planned.items is not None
            for checkpoint in filter(None, (pair.original, pair.result)):
                check_task(planned.items, tokenizer, _scoring(planned.task), checkpoint.config)
    foreign = [planned.task.source or planned.task.name for planned in pair.tasks if planned.items is None]
    if not foreign:
        return None
    from compress.measure.tasks.lm_eval_check import check_lm_eval, quiet
    from compress.measure.tasks.lm_eval_items import check_settings

    checked = check_lm_eval(foreign, trust_remote_code=pair.trust_remote_code)
    with quiet(trusted=checked.trusted):
        for planned in pair.tasks:
            if planned.items is None:
                name = planned.task.source or planned.task.name
                fewshot, metric = planned.task.fewshot, planned.task.metric
                check_settings(name, checked.tasks[name], fewshot=fewshot, metric=metric)
    return checked


def compare_answers(pair: Pair, windows: Windows | None, foreign: LmEvalTasks | None) -> Answers:
    """Everything that `evaluate` asks for; nothing where it is off.

    Args:
        windows: held-out text; None where there is none to be measured on.
        foreign: the tasks of lm-eval, from `check_tasks`.

    Raises:
        BrokenResultError: outputs of a model are not finite.
    """
    answers = Answers()
    evaluate = pair.asked.evaluate
    if evaluate is None or (windows is None and not pair.tasks and not _retrieves(pair)):
        return answers
    import torch

    original, result = pair.load_original(torch.float32), pair.load_result(torch.float32)
    if windows is not None and evaluate.fidelity is not None:
        _fidelity(pair, original, result, windows, answers)
    if pair.tasks:
        _tasks(pair, original, result, foreign, answers)
    if windows is not None and evaluate.generation is not None and pair.kind == "decoder":
        _generation(pair, original, result, windows, answers)
    if _retrieves(pair):
        _retrieval(pair, original, result, answers)
    return answers


def _retrieves(pair: Pair) -> bool:
    evaluate = pair.asked.evaluate
    return pair.kind == "encoder" and evaluate is not None and evaluate.retrieval is not None and _embeds(pair)


def _embeds(pair: Pair) -> bool:
    """A classifier's states are not made to be compared with each other."""
    names = pair.original.config.get("architectures") or [""]
    return not str(names[0]).endswith("ForSequenceClassification")


def _settings(pair: Pair, **conditions: Any) -> dict[str, Any]:
    facts = {"dtype": "float32", "device": pair.device, "engine": "reference"} | conditions
    return {"levels": pair.levels, "seed": pair.asked.seed, "conditions": facts}


def _fidelity(
    pair: Pair, original: PreTrainedModel, result: PreTrainedModel, windows: Windows, answers: Answers
) -> None:
    settings = _settings(pair, text=windows.facts()["source"])
    if pair.kind == "decoder":
        from compress.measure.fidelity import compare_logits, fidelity_measurements
        from compress.measure.floor import floor_measurements, floor_tokens

        tokens = compare_logits(original, result, windows, pair.progress)
        answers.add(fidelity_measurements(tokens, **settings), tokens.rows())
        floors = floor_tokens(original, windows, pair.progress)
        answers.add(floor_measurements(floors, **settings), [row for floor in floors for row in floor.rows()])
        return
    from compress.measure.encoder import (
        compare_embeddings,
        encoder_floor,
        encoder_floor_measurements,
        encoder_measurements,
        read_pooling,
    )

    pooling = read_pooling(pair.original.folder)
    texts = compare_embeddings(original, result, windows, pooling, pair.progress)
    answers.add(encoder_measurements(texts, **settings), texts.rows())
    floor = encoder_floor(original, windows, pooling, pair.progress)
    answers.add(encoder_floor_measurements(floor, **settings), floor.rows())


def _tasks(
    pair: Pair, original: PreTrainedModel, result: PreTrainedModel, foreign: LmEvalTasks | None, answers: Answers
) -> None:
    from compress.measure.tasks.accuracy import task_measurements
    from compress.measure.tasks.answers import task_records
    from compress.model.load import load_tokenizer

    tokenizer = load_tokenizer(pair.original.folder, trust_remote_code=pair.trust_remote_code)
    found: list[TaskPairs] = []
    for planned in pair.tasks:
        if planned.items is not None:
            from compress.measure.tasks.scoring import answer_task

            scoring = _scoring(planned.task)
            found.append(answer_task(original, result, tokenizer, planned.items, scoring, pair.progress))
        else:
            assert foreign is not None
            found += _of_lm_eval(planned, original, result, tokenizer, foreign, pair.progress)
    answers.add(task_measurements(found, **_settings(pair)), [row for one in found for row in one.rows()])
    answers.tasks = tuple(task_records(found))


def _of_lm_eval(
    planned: PlannedTask,
    original: PreTrainedModel,
    result: PreTrainedModel,
    tokenizer: Any,
    foreign: LmEvalTasks,
    progress: Progress,
) -> list[TaskPairs]:
    """The task's answers, under the name that the recipe gives it; the tasks of a group keep their own."""
    from compress.measure.tasks.lm_eval_tasks import answer_lm_eval

    task = planned.task
    found = answer_lm_eval(
        original,
        result,
        tokenizer,
        foreign,
        task.source or task.name,
        items=planned.most,
        metric=task.metric,
        progress=progress,
    )
    return [replace(found[0], name=task.name)] if len(found) == 1 else found


def _scoring(task: Any) -> Any:
    from compress.measure.tasks.prompts import Scoring

    given = {"prompt": task.prompt, "new_tokens": task.new_tokens, "stop": task.stop}
    return Scoring(**given) if task.metric is None else Scoring(metric=task.metric, **given)


def _generation(
    pair: Pair, original: PreTrainedModel, result: PreTrainedModel, windows: Windows, answers: Answers
) -> None:
    from compress.measure.generation import compare_generation, generation_measurements

    assert pair.asked.evaluate is not None
    asked = pair.asked.evaluate.generation
    assert asked is not None
    prompt, new_tokens = _fitting(pair, asked.prompt, asked.new_tokens)
    generations = compare_generation(
        original,
        result,
        windows,
        prompts=asked.prompts,
        prompt=prompt,
        new_tokens=new_tokens,
        progress=pair.progress,
    )
    answers.add(generation_measurements(generations, **_settings(pair)), generations.rows())


def _fitting(pair: Pair, prompt: int, new_tokens: int) -> tuple[int, int]:
    """No more than the model has positions for."""
    positions = pair.positions
    if positions is None or prompt + new_tokens <= positions:
        return prompt, new_tokens
    shorter = min(prompt, positions // 2)
    pair.progress.say(
        f"Answers are {positions - shorter} tokens to prompts of {shorter}: the model has {positions} positions."
    )
    return shorter, positions - shorter


def _retrieval(pair: Pair, original: PreTrainedModel, result: PreTrainedModel, answers: Answers) -> None:
    from compress.data.retrieval import default_retrieval
    from compress.measure.encoder import longest_text, read_pooling
    from compress.measure.retrieval import compare_retrieval, retrieval_measurements
    from compress.model.load import load_tokenizer

    assert pair.asked.evaluate is not None
    asked = pair.asked.evaluate.retrieval
    assert asked is not None
    found = compare_retrieval(
        original,
        result,
        default_retrieval(asked.documents),
        load_tokenizer(pair.original.folder, trust_remote_code=pair.trust_remote_code),
        read_pooling(pair.original.folder),
        length=min(longest_text(pair.original.folder) or DOCUMENT_TOKENS, pair.positions or DOCUMENT_TOKENS),
        progress=pair.progress,
    )
    answers.add(retrieval_measurements(found, **_settings(pair)), found.rows())
