"""The texts of a run: read and checked against each other before anything is loaded, then cut into windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from compress.data.text import Corpus, check_disjoint, read_corpus
from compress.errors import UsageError
from compress.model.architectures import Kind
from compress.model.checkpoint import Checkpoint
from compress.model.hub import resolve
from compress.pipeline.job import Job
from compress.pipeline.pair import Pair
from compress.plan.planning import Plan
from compress.plan.tasks import Asked
from compress.progress import Progress
from compress.recipe.evaluate import Fidelity

if TYPE_CHECKING:
    from compress.data.windows import Windows


def read_texts(plan: Plan) -> tuple[Corpus | None, Corpus | None]:
    """Both texts, checked against each other before anything is loaded."""
    recipe = plan.recipe
    chat = _chat_template(plan.original, recipe.model)
    calibration = (
        read_corpus(recipe.calibration.source, part="calibration", chat_template=chat) if plan.calibrates else None
    )
    evaluation = read_evaluation(recipe, plan.anatomy.kind, plan.original, recipe.model)
    if calibration is not None and evaluation is not None:
        check_disjoint(calibration, evaluation)
    return calibration, evaluation


def read_evaluation(asked: Asked, kind: Kind, checkpoint: Checkpoint, model: str) -> Corpus | None:
    """The held-out text, if anything is measured on it."""
    needed = _held_out(asked, kind)
    if needed is None:
        return None
    return read_corpus(needed.source, part="evaluation", chat_template=_chat_template(checkpoint, model))


def _held_out(asked: Asked, kind: Kind) -> Fidelity | None:
    """Which text fidelity is measured on; of a decoder without fidelity, which one gives the prompts to go on with."""
    evaluate = asked.evaluate
    if evaluate is None:
        return None
    if evaluate.fidelity is None and evaluate.generation is not None and kind == "decoder":
        least = evaluate.generation.prompts * evaluate.generation.prompt
        return Fidelity(tokens=least, length=max(2, evaluate.generation.prompt))
    return evaluate.fidelity


def _chat_template(checkpoint: Checkpoint, model: str) -> Callable[[list[dict[str, Any]]], str]:
    """Renders chat messages with the model's own template.

    The tokenizer is loaded when the first message comes, and a hub model's files are downloaded for it.
    """

    @cache
    def tokenizer() -> Any:
        from compress.model.load import load_tokenizer

        complete = checkpoint if checkpoint.has_weights else resolve(model, weights=True)
        return load_tokenizer(complete.folder)

    def render(messages: list[dict[str, Any]]) -> str:
        if not tokenizer().chat_template:
            raise UsageError(
                f"{checkpoint.source}: the text has chat messages, but the tokenizer has no chat template.",
                hint="Give text with a `text` key, or a model with a chat template.",
            )
        return str(tokenizer().apply_chat_template(messages, tokenize=False))

    return render


def calibration_windows(job: Job, corpus: Corpus | None) -> Windows | None:
    if corpus is None:
        return None
    calibration = job.recipe.calibration
    original = job.plan.original
    length = capped(original.positions, calibration.length, job.progress)
    trusted = job.options.trust_remote_code
    return _windows(original, job.plan.anatomy.kind, corpus, trusted, length=length, samples=calibration.samples)


def evaluation_windows(pair: Pair, corpus: Corpus | None) -> Windows | None:
    needed = _held_out(pair.asked, pair.kind)
    if corpus is None or needed is None:
        return None
    length = capped(pair.positions, needed.length, pair.progress)
    trusted = pair.trust_remote_code
    return _windows(pair.original, pair.kind, corpus, trusted, length=length, tokens=needed.tokens)


def _windows(checkpoint: Checkpoint, kind: Kind, corpus: Corpus, trust_remote_code: bool, **size: int) -> Windows:
    from compress.data.windows import check_ids, decoder_windows, encoder_windows
    from compress.model.load import load_tokenizer, vocabulary

    make = decoder_windows if kind == "decoder" else encoder_windows
    windows = make(corpus, load_tokenizer(checkpoint.folder, trust_remote_code=trust_remote_code), **size)
    check_ids(windows, vocabulary(checkpoint, trust_remote_code=trust_remote_code), checkpoint.source)
    return windows


def capped(positions: int | None, length: int, progress: Progress) -> int:
    """No window is longer than the model's positions, where it says how many it has."""
    if positions is None or length <= positions:
        return length
    progress.say(f"Windows are {positions} tokens instead of {length}: the model has no more positions.")
    return positions
