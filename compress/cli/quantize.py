"""`compress quantize MODEL --target int4`: a recipe from options."""

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
from compress.scheme import TARGETS


def quantize(
    model: ModelArgument,
    target: Annotated[str, typer.Option("--target", "-t", help=f"One of {', '.join(TARGETS)}.")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="Default: ./<model name>-<target>.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="gptq or rtn. Default: gptq for int4, rtn for the others.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="compressed-tensors, gptq, gptq_v2, gguf, bitsandbytes. Default: by target.")
    ] = None,
    group_size: Annotated[
        str | None, typer.Option(metavar="auto|-1|N", help="Input columns that share a scale; -1: a whole row.")
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric", help="Codes centred on zero, or a zero point per group.  [default: symmetric]"
        ),
    ] = None,
    dequantize: Dequantize = False,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Layers to leave alone, as well as the protected ones.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB=TARGET[:GROUP_SIZE]",
            help="Another target for some layers: '*.down_proj=int8-weight'. Repeatable; the last that matches counts.",
        ),
    ] = None,
    damping: Annotated[float | None, typer.Option(help="gptq: share of the mean Hessian diagonal.")] = None,
    gptq: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Switch off what gptq does beyond the published algorithm: asymmetric=false. Repeatable.",
        ),
    ] = None,
    max_fallback: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="gptq: layers that may fall back to round-to-nearest.  [default: 5%]"),
    ] = None,
    refine: Annotated[
        int | None, typer.Option(metavar="N", help="gptq: steps of block-wise learning after it.")
    ] = None,
    smooth: Annotated[
        bool | None,
        typer.Option(
            "--smooth/--no-smooth", help="Fold factors into norms, so that inputs round better.  [default: int8 only]"
        ),
    ] = None,
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
    """Store the weights of a model in fewer bits, prove the result, measure it and judge it."""
    finish_recipe(locals(), "quantize")
