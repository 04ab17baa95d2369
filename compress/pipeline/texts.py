"""The texts of a run: read and checked against each other before anything is loaded, then cut into windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from compress.data.text import Corpus, check_disjoint, read_corpus
from compress.errors import UsageError
from compress.model.hub import resolve
from compress.pipeline.job import Job
from compress.plan.planning import Plan

if TYPE_CHECKING:
    from compress.data.windows import Windows


def read_texts(plan: Plan) -> tuple[Corpus | None, Corpus | None]:
    """Both texts, checked against each other before anything is loaded."""
    recipe = plan.recipe
    chat = _chat_template(plan)
    calibration = (
        read_corpus(recipe.calibration.source, part="calibration", chat_template=chat) if plan.calibrates else None
    )
    evaluation = None
    if recipe.evaluate is not None:
        evaluation = read_corpus(recipe.evaluate.fidelity.source, part="evaluation", chat_template=chat)
    if calibration is not None and evaluation is not None:
        check_disjoint(calibration, evaluation)
    return calibration, evaluation


def _chat_template(plan: Plan) -> Callable[[list[dict[str, Any]]], str]:
    """Renders chat messages with the model's own template.

    The tokenizer is loaded when the first message comes, and a hub model's files are downloaded for it.
    """

    @cache
    def tokenizer() -> Any:
        from compress.model.load import load_tokenizer

        checkpoint = plan.checkpoint if plan.checkpoint.has_weights else resolve(plan.recipe.model, weights=True)
        return load_tokenizer(checkpoint.folder)

    def render(messages: list[dict[str, Any]]) -> str:
        if not tokenizer().chat_template:
            raise UsageError(
                f"{plan.checkpoint.source}: the text has chat messages, but the tokenizer has no chat template.",
                hint="Give text with a `text` key, or a model with a chat template.",
            )
        return str(tokenizer().apply_chat_template(messages, tokenize=False))

    return render


def calibration_windows(job: Job, corpus: Corpus | None) -> Windows | None:
    if corpus is None:
        return None
    calibration = job.recipe.calibration
    length = capped(job, calibration.length)
    return _windows(job, corpus, length=length, samples=calibration.samples)


def evaluation_windows(job: Job, corpus: Corpus | None) -> Windows | None:
    if corpus is None or job.recipe.evaluate is None:
        return None
    fidelity = job.recipe.evaluate.fidelity
    return _windows(job, corpus, length=capped(job, fidelity.length), tokens=fidelity.tokens)


def _windows(job: Job, corpus: Corpus, **size: int) -> Windows:
    from compress.data.windows import check_ids, decoder_windows, encoder_windows
    from compress.model.load import load_tokenizer

    make = decoder_windows if job.plan.anatomy.kind == "decoder" else encoder_windows
    tokenizer = load_tokenizer(job.checkpoint.folder, trust_remote_code=job.options.trust_remote_code)
    windows = make(corpus, tokenizer, **size)
    check_ids(windows, _embedding_rows(job), job.checkpoint.source)
    return windows


def _embedding_rows(job: Job) -> int:
    """Rows of the input embedding, which is the number of ids the model knows."""
    names = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
    return next(info.shape[0] for name, info in job.checkpoint.tensors.items() if name.endswith(names))


def capped(job: Job, length: int) -> int:
    """No window is longer than the model's positions."""
    positions = job.checkpoint.positions
    if positions is None or length <= positions:
        return length
    job.progress.say(f"Windows are {positions} tokens instead of {length}: the model has no more positions.")
    return positions
