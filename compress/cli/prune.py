"""`compress prune MODEL --keep-ffn 0.75`: a recipe from options."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.cli.options import (
    Batch,
    BatchSize,
    Bench,
    BenchBudget,
    Calibration,
    Dequantize,
    Device,
    Evaluate,
    Evaluation,
    EvaluationTokens,
    Gates,
    Json,
    Length,
    MaxShardSize,
    Memory,
    ModelArgument,
    NewTokens,
    Overwrite,
    Precision,
    Prompt,
    Quiet,
    Resume,
    Samples,
    Seed,
    TaskItems,
    Tasks,
    TrustRemoteCode,
    Verbose,
    finish_recipe,
)

_AMOUNT = "SHARE|N"


def prune(
    model: ModelArgument,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="Default: ./<model name>-pruned.")
    ] = None,
    keep_ffn: Annotated[
        str | None,
        typer.Option(
            metavar=_AMOUNT,
            help="Feed-forward channels to keep: a share with a point or % (0.75, 75%), or a count.",
        ),
    ] = None,
    keep_heads: Annotated[
        str | None, typer.Option(metavar=_AMOUNT, help="Query heads of every layer to keep: 6, or a share.")
    ] = None,
    keep_kv_heads: Annotated[
        str | None,
        typer.Option(metavar=_AMOUNT, help="Key and value heads to keep, each with all of its query heads."),
    ] = None,
    keep_layers: Annotated[str | None, typer.Option(metavar=_AMOUNT, help="Transformer layers to keep.")] = None,
    params: Annotated[
        str | None,
        typer.Option(metavar="FACTOR", help="Search for the best shape with at most so many of the parameters: 0.8x."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Search for the best shape whose weight files take at most so much: 100MB."),
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What decides which units go: obs, magnitude, activation, taylor, random.  [default: obs]",
        ),
    ] = None,
    compensate: Annotated[
        bool | None,
        typer.Option(
            "--compensate/--no-compensate",
            help="Fit the remaining weights, so that they make up for what was removed.  [default: compensate]",
        ),
    ] = None,
    ffn_multiple: Annotated[
        str | None, typer.Option(metavar="auto|N", help="Feed-forward widths are multiples of this.  [default: auto]")
    ] = None,
    dequantize: Dequantize = False,
    max_shard_size: MaxShardSize = None,
    calibration: Calibration = None,
    samples: Samples = None,
    length: Length = None,
    batch_size: BatchSize = None,
    evaluate: Evaluate = None,
    evaluation: Evaluation = None,
    evaluation_tokens: EvaluationTokens = None,
    task: Tasks = None,
    task_items: TaskItems = None,
    bench: Bench = None,
    bench_budget: BenchBudget = None,
    precision: Precision = None,
    prompt: Prompt = None,
    new_tokens: NewTokens = None,
    batch: Batch = None,
    gate: Gates = None,
    seed: Seed = None,
    device: Device = "auto",
    memory: Memory = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Take feed-forward channels, heads or layers out of a model, prove the result, measure it and judge it."""
    finish_recipe(locals(), "prune")
