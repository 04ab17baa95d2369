"""`compress bench ORIGINAL [RESULT]`: how fast a model is, and whether another one is really faster."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.cli.options import (
    Batch,
    Device,
    Gates,
    Json,
    NewTokens,
    Precision,
    Prompt,
    Quiet,
    ReportFolder,
    Seed,
    TrustRemoteCode,
    Verbose,
    finish,
    run_comparison,
)
from compress.cli.terminal import Terminal


def bench(
    original: Annotated[str, typer.Argument(metavar="A", help="Folder of the original model, or hub id.")],
    result: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Folder of the model to compare with it, or hub id.")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Measuring time.  [default: 60s]")] = None,
    precision: Precision = None,
    prompt: Prompt = None,
    new_tokens: NewTokens = None,
    batch: Batch = None,
    gate: Gates = None,
    output: ReportFolder = None,
    seed: Seed = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Time one model, or two against each other: interleaved, after a check of the machine's own noise."""
    terminal = Terminal(quiet=quiet, verbose=verbose > 0, json=json)
    options = {
        "ORIGINAL": original,
        "RESULT": result,
        "--output": output,
        "--evaluate": False,
        "--bench": True,
        "--budget": budget,
        "--precision": precision,
        "--prompt": prompt,
        "--new-tokens": new_tokens,
        "--batch": batch,
        "--gate": gate or None,
        "--seed": seed,
    }
    finish(
        terminal,
        lambda: run_comparison(terminal, options, "bench", device=device, trust_remote_code=trust_remote_code),
    )
