"""`compress quantize MODEL --target int4`: a recipe from options."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from compress.cli.options import (
    BENCH,
    Batch,
    Device,
    Evaluation,
    EvaluationTokens,
    Gates,
    Json,
    Memory,
    NewTokens,
    Overwrite,
    Precision,
    Prompt,
    Quiet,
    Resume,
    Seed,
    TaskItems,
    Tasks,
    TrustRemoteCode,
    Verbose,
    finish,
    run_recipe,
)
from compress.cli.terminal import Terminal
from compress.scheme import TARGETS

_CALIBRATION = "Calibration"


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of the model, hub id, or hub id@revision.")],
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
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Start from the weights of a model that is quantized already.")
    ] = False,
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
    max_shard_size: Annotated[str | None, typer.Option(metavar="SIZE", help="Largest weight file: 5GB.")] = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="TEXT", help="default, a file, or a data set.", rich_help_panel=_CALIBRATION)
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Windows of text.", rich_help_panel=_CALIBRATION)] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in each.", rich_help_panel=_CALIBRATION)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Windows on the device together.", rich_help_panel=_CALIBRATION)
    ] = None,
    evaluate: Annotated[
        bool | None,
        typer.Option(
            "--evaluate/--no-evaluate", help="Compare with the original on held-out text.  [default: evaluate]"
        ),
    ] = None,
    evaluation: Evaluation = None,
    evaluation_tokens: EvaluationTokens = None,
    task: Tasks = None,
    task_items: TaskItems = None,
    bench: Annotated[
        bool | None, typer.Option("--bench/--no-bench", help="Measure latency and memory.  [default: bench]")
    ] = None,
    bench_budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Measuring time: 60s.", rich_help_panel=BENCH)
    ] = None,
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
    terminal = Terminal(quiet=quiet, verbose=verbose > 0, json=json)
    options: dict[str, Any] = {
        "MODEL": model,
        "--target": target,
        "--output": output,
        "--algorithm": algorithm,
        "--format": format,
        "--group-size": group_size,
        "--symmetric": symmetric,
        "--dequantize": dequantize or None,
        "--skip": skip or None,
        "--override": override or None,
        "--damping": damping,
        "--gptq": gptq or None,
        "--max-fallback": max_fallback,
        "--refine": refine,
        "--smooth": smooth,
        "--max-shard-size": max_shard_size,
        "--calibration": calibration,
        "--samples": samples,
        "--length": length,
        "--batch-size": batch_size,
        "--evaluate": evaluate is not False,
        "--evaluation": evaluation,
        "--evaluation-tokens": evaluation_tokens,
        "--task": task or None,
        "--task-items": task_items,
        "--bench": bench is not False,
        "--bench-budget": bench_budget,
        "--precision": precision,
        "--prompt": prompt,
        "--new-tokens": new_tokens,
        "--batch": batch,
        "--gate": gate or None,
        "--seed": seed,
    }

    def load() -> Any:
        from compress.recipe.options import recipe_from_options

        return recipe_from_options(options)

    finish(
        terminal,
        lambda: run_recipe(
            terminal,
            load,
            overwrite=overwrite,
            resume=resume,
            device=device,
            memory=memory,
            trust_remote_code=trust_remote_code,
        ),
    )
