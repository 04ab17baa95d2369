"""Whether what is to be measured can be measured on this model: told from its config, before anything is loaded."""

from __future__ import annotations

from compress.model.architectures import Kind
from compress.plan.tasks import Asked
from compress.recipe.origin import Fault

_TEXT = ("kl.", "tv.", "top1.", "perplexity", "generation.")
_DECODERS_ONLY = (*_TEXT, "latency.ttft", "latency.tpot", "latency.e2e", "throughput.decode", "kv_bytes")
_ENCODERS_ONLY = ("cosine.", "similarity.", "ndcg", "latency.forward")
_COUNTED = ("size", "bits_per_weight")
"""All that is known of models of other kinds."""


def check_asked(asked: Asked, kind: Kind, positions: int | None, *, cast: str | None = None) -> None:
    """Refuses gates on what is not measured for such a model, instead of leaving them undecided, and prompts that do
    not fit.

    Args:
        positions: how many tokens the model can hold; None where it says nothing.
        cast: the dtype, where the step is a cast.

    Raises:
        UsageError: with the line or the option of every fault.
    """
    faults = _gates(asked, kind, cast) + _prompts(asked, kind, positions)
    if faults:
        raise asked.error(faults)


def _gates(asked: Asked, kind: Kind, cast: str | None) -> list[Fault]:
    foreign = _DECODERS_ONLY if kind == "encoder" else _ENCODERS_ONLY
    faults: list[Fault] = []
    for index, gate in enumerate(asked.gates):
        if kind == "other" and not gate.metric.startswith(_COUNTED):
            why = f"{gate.metric} is not measured for models that neither go on with a text nor read one"
            faults.append((("gates", index), why))
        elif gate.metric.startswith(foreign):
            faults.append((("gates", index), f"{gate.metric} is not measured for models of this kind ({kind})"))
        elif gate.metric == "bits_per_weight" and cast:
            faults.append((("gates", index), "the target is a cast and has no bits_per_weight"))
    return faults


def _prompts(asked: Asked, kind: Kind, positions: int | None) -> list[Fault]:
    """The longest prompt and answer must fit the model's positions."""
    faults: list[Fault] = []
    if positions is None or kind == "other":
        return faults
    if asked.bench is not None:
        prompt, new = max(asked.bench.prompt), max(asked.bench.new_tokens)
        length = prompt + (new - 1 if kind == "decoder" else 0)
        if length > positions:
            answer = f" and {new} new tokens" if kind == "decoder" else ""
            faults.append(
                (
                    ("bench", "prompt"),
                    f"a prompt of {prompt}{answer} need {length} positions; the model has {positions}",
                )
            )
    return faults
