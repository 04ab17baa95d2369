"""`compress eval` and `compress bench`: two models that are there already, measured side by side, judged, reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from compress.data.text import Corpus
from compress.errors import UsageError
from compress.model.checkpoint import Checkpoint
from compress.model.finite import check_finite
from compress.model.hub import resolve
from compress.model.kind import model_kind
from compress.pipeline.job import Options, chosen_device
from compress.pipeline.pair import Pair, is_ours
from compress.pipeline.report_folder import check_report_folder, held
from compress.pipeline.texts import evaluation_windows, read_evaluation
from compress.plan.asked import check_asked
from compress.plan.tasks import plan_tasks
from compress.progress import Progress
from compress.recipe.comparison import Comparison
from compress.records import Measurement
from compress.report.schema import Report

if TYPE_CHECKING:
    from compress.pipeline.measured import Measured

BYTES_PER_MB = 1_000_000


@dataclass(frozen=True)
class Compared:
    """Attributes:
    report_file: report.json, or None if none was asked for.
    """

    report: Report
    report_file: Path | None


def compare(asked: Comparison, command: Literal["eval", "bench"], options: Options, progress: Progress) -> Compared:
    """Measures what is asked about two models, or about one (bench).

    Raises:
        CompressError: see `compress.errors`; a gate that fails is no error but the report's verdict.
    """
    original = resolve(asked.original, weights=True, trust_remote_code=options.trust_remote_code)
    result = None
    if asked.result is not None:
        result = resolve(asked.result, weights=True, trust_remote_code=options.trust_remote_code)
        _check_alike(original, result)
    kind = model_kind(original.config)
    if kind == "other":
        raise UsageError(
            f"{original.source}: answers and times of {original.model_type} cannot be measured by this version of "
            "compress, which measures models that go on with a text or read one."
        )
    folder = None if asked.output is None else Path(asked.output).expanduser()
    pair = Pair(
        original=original,
        result=result,
        kind=kind,
        parameters=parameters(original),
        asked=asked,
        tasks=(),
        device="cpu",
        trust_remote_code=options.trust_remote_code,
        progress=progress,
        ours=result is not None and is_ours(result),
    )
    check_asked(asked, kind, pair.positions)
    pair = replace(pair, tasks=plan_tasks(asked, kind))
    if folder is not None:
        check_report_folder(folder)
    text = read_evaluation(asked, kind, original, asked.original)
    pair = replace(pair, device=chosen_device(options.device))
    with held(folder):
        return _measured(pair, command, text, folder, options.command)


def _measured(
    pair: Pair, command: Literal["eval", "bench"], text: Corpus | None, folder: Path | None, typed: str | None
) -> Compared:
    """Everything that needs torch, with the report's folder held."""
    import torch

    from compress.pipeline.answers import Answers, check_tasks, compare_answers
    from compress.pipeline.measured import measured
    from compress.pipeline.reporting import comparison_report
    from compress.pipeline.timed import timed_report
    from compress.pipeline.timing import left_out, not_timed, why_not_timed

    torch.manual_seed(pair.asked.seed)
    foreign = check_tasks(pair)
    windows = evaluation_windows(pair, text)
    for checkpoint in filter(None, (pair.original, pair.result)):
        check_finite(checkpoint, pair.progress)
    answers = Answers() if pair.result is None else compare_answers(pair, windows, foreign)
    counted = [*_sizes(pair.original, pair.result), *left_out(pair)]

    def report_on(found: Measured) -> Report:
        return comparison_report(pair, command=command, evaluation=windows, measured=found, typed=typed)

    report, file = timed_report(
        pair,
        folder,
        report_on,
        lambda timed: measured(counted, answers, timed),
        lambda error: measured([*counted, *not_timed(pair, error)], answers, None, why_not_timed(error)),
    )
    return Compared(report, file)


def parameters(checkpoint: Checkpoint) -> int:
    """Numbers in the weight files; of packed weights fewer than the model computes with. For estimates of memory."""
    return sum(math.prod(info.shape) for info in checkpoint.tensors.values())


def _check_alike(original: Checkpoint, result: Checkpoint) -> None:
    """Two models that cannot answer the same question cannot be compared."""
    kinds = model_kind(original.config), model_kind(result.config)
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{original.source} is of kind {kinds[0]} and {result.source} of kind {kinds[1]}: they answer different "
            "questions.",
            hint="Compare a model with the original that it was made from.",
        )
    sizes = original.config.get("vocab_size"), result.config.get("vocab_size")
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{original.source} has a vocabulary of {sizes[0]} and {result.source} of {sizes[1]}: their answers cannot "
            "be compared token by token.",
            hint="Compare a model with the original that it was made from.",
        )


def _sizes(original: Checkpoint, result: Checkpoint | None) -> Sequence[Measurement]:
    found = [_size("original", original)]
    if result is not None:
        ratio = result.weight_bytes / original.weight_bytes
        found += [_size("result", result), Measurement("size.ratio", "result/original", ratio)]
    return found


def _size(subject: str, checkpoint: Checkpoint) -> Measurement:
    return Measurement("size", subject, checkpoint.weight_bytes / BYTES_PER_MB, len(checkpoint.shard_bytes))
