"""`compress eval ORIGINAL RESULT`: how good the answers of a compressed model still are."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.cli.options import (
    Device,
    Evaluation,
    EvaluationTokens,
    Gates,
    Json,
    Quiet,
    ReportFolder,
    Seed,
    TaskItems,
    Tasks,
    TrustRemoteCode,
    Verbose,
    finish,
    run_comparison,
)
from compress.cli.terminal import Terminal


def evaluate(
    original: Annotated[str, typer.Argument(metavar="ORIGINAL", help="Folder of the original model, or hub id.")],
    result: Annotated[str, typer.Argument(metavar="RESULT", help="Folder of the compressed model, or hub id.")],
    task: Tasks = None,
    task_items: TaskItems = None,
    evaluation: Evaluation = None,
    evaluation_tokens: EvaluationTokens = None,
    gate: Gates = None,
    output: ReportFolder = None,
    seed: Seed = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Compare two models in pairs: tasks, fidelity, generation."""
    terminal = Terminal(quiet=quiet, verbose=verbose > 0, json=json)
    options = {
        "ORIGINAL": original,
        "RESULT": result,
        "--output": output,
        "--evaluate": True,
        "--task": task or None,
        "--task-items": task_items,
        "--evaluation": evaluation,
        "--evaluation-tokens": evaluation_tokens,
        "--gate": gate or None,
        "--seed": seed,
        "--bench": False,
    }
    finish(
        terminal,
        lambda: run_comparison(terminal, options, "eval", device=device, trust_remote_code=trust_remote_code),
    )
