"""What the two models write: greedy continuations of the same prompts, token by token.

All prompts are equally long and run as one batch, so nothing is padded and both models compute in one layout. The
sampling settings of the folder are not used: the likeliest token is taken, without penalties. An answer ends with the
model's end token (which belongs to it) or after `new_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import BrokenResultError, UsageError
from compress.measure.fidelity import not_finite_hint
from compress.measure.latency.worker import cache_name, last_position_option
from compress.measure.statistics import Estimate, FloatArray, order_statistic_quantile, ratio_of_sums
from compress.records import ORIGINAL, PAIRED, RESULT, Measurement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.data.windows import Windows
    from compress.progress import Advance, Progress

GRAM = 4
Answers = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Generations:
    """The answers of both models to the same prompts, as ids; an end token is the last of its answer.

    Attributes:
        prompt: tokens of each prompt.
        new_tokens: tokens of an answer at most.
    """

    original: Answers
    result: Answers
    prompt: int
    new_tokens: int

    def rows(self) -> list[dict[str, Any]]:
        """One row of plain data per prompt for the raw file in the report folder."""
        return [
            {"kind": "generation", "prompt": prompt, "original": list(original), "result": list(result)}
            for prompt, (original, result) in enumerate(zip(self.original, self.result, strict=True))
        ]


def compare_generation(
    original: PreTrainedModel,
    result: PreTrainedModel,
    windows: Windows,
    *,
    prompts: int,
    prompt: int,
    new_tokens: int,
    progress: Progress,
) -> Generations:
    """Lets both models continue the first `prompt` tokens of the first `prompts` windows; fewer where fewer exist.

    Prompts are shorter, which is said, where no window has so many tokens.

    Raises:
        BrokenResultError: logits of a model are not finite.
        UsageError: prompt and answer do not fit into the model's positions.
    """
    longest = max(len(ids) for ids in windows.ids)
    if longest < prompt:
        progress.say(f"Prompts are {longest} tokens instead of {prompt}: the windows of the text are no longer.")
        prompt = longest
    _check_positions(original, prompt, new_tokens)
    starts = [ids[:prompt] for ids in windows.ids if len(ids) >= prompt][:prompts]
    ids, ends = torch.stack(starts), end_ids(original)
    with torch.inference_mode(), progress.phase("generation", 2 * new_tokens) as advance:
        answers = [
            greedy(model, ids, new_tokens, ends, name, advance)
            for model, name in ((original, ORIGINAL), (result, RESULT))
        ]
    return Generations(answers[0], answers[1], prompt, new_tokens)


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end an answer: of the generation config, else of the config, either of which may have a list."""
    for config in (model.generation_config, model.config, model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else (found,))
    return frozenset()


def greedy(
    model: PreTrainedModel, ids: Tensor, new_tokens: int, ends: frozenset[int], name: str, advance: Advance
) -> Answers:
    """The likeliest continuations of prompts [P, T], each up to its first end id, at most `new_tokens` long.

    A batch keeps its size until all its answers have ended: what is computed after an end is cut off.

    Raises:
        BrokenResultError: logits of the model `name` are not finite.
    """
    inputs = ids.to(model.device)
    memory: dict[str, Any] = {}
    tokens: list[Tensor] = []
    ended = torch.zeros(len(ids), dtype=torch.bool)
    stops = torch.tensor(sorted(ends), dtype=torch.int64)
    for step in range(new_tokens):
        output = model(input_ids=inputs, use_cache=True, **memory, **last_position_option(model))
        logits = output.logits[:, -1]  # [P, V]
        _check_finite(logits, name, step)
        memory = {cache_name(model): getattr(output, cache_name(model))}
        inputs = logits.argmax(dim=-1, keepdim=True)  # [P, 1]
        tokens.append(inputs.squeeze(-1).cpu())
        ended |= torch.isin(tokens[-1], stops)
        advance(1)
        if bool(ended.all()):
            break
    answers = torch.stack(tokens, dim=1).tolist()  # [P, steps]
    return tuple(_until_end(answer, ends) for answer in answers)


def generation_measurements(
    found: Generations,
    *,
    levels: Sequence[float] = (),
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """Length ratio, repetition of both and first divergence, with 95 % intervals over prompts.

    Args:
        levels: one-sided confidence levels that gates ask for; 0.95 is always added.
    """
    wanted, count = tuple(sorted({0.95, *levels})), len(found.original)
    lengths = {"prompts": count, "prompt": found.prompt, "new_tokens": found.new_tokens}
    facts = dict(conditions or {}) | lengths | {"decoding": "greedy"}

    def ratio(above: FloatArray, below: FloatArray) -> Estimate:
        return ratio_of_sums(above, below, rng=np.random.default_rng(seed), levels=wanted, items_are="prompts")

    def measured(metric: str, subject: str, estimate: Estimate, note: str | None = None) -> Measurement:
        return Measurement(metric, subject, estimate.value, count, estimate.interval, estimate.one_sided, facts, note)

    def repetition(answers: Answers, subject: str) -> Measurement:
        repeated, grams = np.array([repeated_grams(answer) for answer in answers], dtype=np.float64).T
        if not grams.any():
            note = f"no answer has {GRAM} tokens"
            return Measurement("generation.repetition", subject, None, count, conditions=facts, note=note)
        return measured("generation.repetition", subject, ratio(100 * repeated, grams))

    original, result = (_lengths(answers) for answers in (found.original, found.result))
    common = [common_prefix(a, b) for a, b in zip(found.original, found.result, strict=True)]
    divergence = order_statistic_quantile(np.array(common, dtype=np.float64), levels=wanted)
    return [
        measured("generation.length_ratio", PAIRED, ratio(result, original), _cut_off(found)),
        repetition(found.original, ORIGINAL),
        repetition(found.result, RESULT),
        measured("generation.first_divergence", PAIRED, divergence, _never_part(found)),
    ]


def repeated_grams(answer: Sequence[int]) -> tuple[int, int]:
    """How many of an answer's GRAM-grams occurred before in it, and how many it has."""
    grams = [tuple(answer[start : start + GRAM]) for start in range(len(answer) - GRAM + 1)]
    return len(grams) - len(set(grams)), len(grams)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the two answers part; all of them where they are equal."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _cut_off(found: Generations) -> str | None:
    """A ratio of 1 says little where all answers were cut off at the same length."""
    original, result = (
        int((_lengths(answers) == found.new_tokens).sum()) for answers in (found.original, found.result)
    )
    if not original and not result:
        return None
    return f"{original} answers of the original and {result} of the result are as long as allowed"


def _never_part(found: Generations) -> str | None:
    equal = sum(a == b for a, b in zip(found.original, found.result, strict=True))
    return f"{equal} of {len(found.original)} answers never part and count with their length" if equal else None


def _lengths(answers: Answers) -> FloatArray:
    return np.array([len(answer) for answer in answers], dtype=np.float64)


def _until_end(answer: Sequence[int], ends: frozenset[int]) -> tuple[int, ...]:
    end = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    return tuple(answer[: end + 1])


def _check_finite(logits: Tensor, name: str, step: int) -> None:
    broken = ~logits.isfinite().all(dim=-1)  # [P]
    if bool(broken.any()):
        prompt = int(broken.nonzero()[0])
        raise BrokenResultError(
            f"logits of the {name} model are not finite in prompt {prompt}, at generated token {step}",
            hint=not_finite_hint(name),
        )


def _check_positions(model: PreTrainedModel, prompt: int, new_tokens: int) -> None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and prompt + new_tokens > positions:
        raise UsageError(
            f"a prompt of {prompt} tokens and {new_tokens} new ones need {prompt + new_tokens} positions; "
            f"the model has {positions}",
            hint="lower `generation.prompt` or `generation.new_tokens`",
        )
