"""Options that commands share, and how a command ends."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import typer

from compress.cli.boundary import Done, run_guarded
from compress.cli.terminal import Terminal
from compress.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but results and errors.")]
Verbose = Annotated[int, typer.Option("-v", "--verbose", count=True, help="Show tracebacks with errors.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output folder, if compress wrote it and nothing was added.")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute. auto: a GPU if torch sees one.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="What models and activations may take: 8GB; more is worked on in pieces, from the disk.  "
        "[default: what is free]",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where an interrupted run of the same output stopped; else start it.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run and copy the Python files of the model folder.")
]

CALIBRATION, EVALUATION, BENCH = "Calibration", "Evaluation", "Benchmark"
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of the model, hub id, or hub id@revision.")]
Dequantize = Annotated[
    bool, typer.Option("--dequantize", help="Start from the weights of a model that is quantized already.")
]
MaxShardSize = Annotated[str | None, typer.Option(metavar="SIZE", help="Largest weight file: 5GB.")]
Calibration = Annotated[
    str | None, typer.Option(metavar="TEXT", help="default, a file, or a data set.", rich_help_panel=CALIBRATION)
]
Samples = Annotated[int | None, typer.Option(help="Windows of text.", rich_help_panel=CALIBRATION)]
Length = Annotated[int | None, typer.Option(help="Tokens in each.", rich_help_panel=CALIBRATION)]
BatchSize = Annotated[int | None, typer.Option(help="Windows on the device together.", rich_help_panel=CALIBRATION)]
Evaluate = Annotated[
    bool | None,
    typer.Option("--evaluate/--no-evaluate", help="Compare with the original on held-out text.  [default: evaluate]"),
]
Evaluation = Annotated[
    str | None, typer.Option(metavar="TEXT", help="default, a file, or a data set.", rich_help_panel=EVALUATION)
]
EvaluationTokens = Annotated[str | None, typer.Option(metavar="N", help="16k.", rich_help_panel=EVALUATION)]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Questions that both models answer: next_sentence, a .jsonl file, or a task of lm-eval. Repeatable.",
        rich_help_panel=EVALUATION,
    ),
]
TaskItems = Annotated[
    str | None, typer.Option(metavar="N", help="At most so many of each task.", rich_help_panel=EVALUATION)
]
Bench = Annotated[bool | None, typer.Option("--bench/--no-bench", help="Measure latency and memory.  [default: bench]")]
BenchBudget = Annotated[str | None, typer.Option(metavar="TIME", help="Measuring time: 60s.", rich_help_panel=BENCH)]
Prompt = Annotated[
    str | None, typer.Option(metavar="N[,N...]", help="Tokens in the prompt; several are swept.", rich_help_panel=BENCH)
]
NewTokens = Annotated[str | None, typer.Option(metavar="N[,N...]", help="Tokens to generate.", rich_help_panel=BENCH)]
Batch = Annotated[str | None, typer.Option(metavar="N[,N...]", help="Prompts at once.", rich_help_panel=BENCH)]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Stop when all ratios are known to this: 2%. Exit code 8 if the time does not suffice.",
        rich_help_panel=BENCH,
    ),
]
Gates = Annotated[
    list[str] | None, typer.Option(metavar="EXPR", help='Condition on the result: "kl.mean <= 0.1". Repeatable.')
]
ReportFolder = Annotated[
    str | None, typer.Option("--output", "-o", metavar="DIR", help="Folder for the report.  [default: none is written]")
]
Seed = Annotated[int | None, typer.Option(help="Start of every random number.")]

_RUN = ("overwrite", "resume", "device", "memory", "trust_remote_code")
_SHOWN = ("json", "quiet", "verbose")


def finish(terminal: Terminal, command: Callable[[], Any]) -> None:
    """Runs a command behind the error boundary and exits with its code."""
    raise typer.Exit(run_guarded(terminal, command))


def typed_command() -> str:
    """The command as it was typed, for the report."""
    return shlex.join(["compress", *sys.argv[1:]])


def parse_memory(text: str | None) -> int | None:
    """Bytes of `--memory`. Raises UsageError: the text is no size."""
    if text is None:
        return None
    from compress.recipe.units import parse_size

    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"--memory: {error.message}", hint=error.hint) from error


def finish_recipe(arguments: Mapping[str, Any], table: Literal["quantize", "prune"]) -> None:
    """Runs the recipe that the arguments of a command stand for, and exits with its code.

    Args:
        arguments: {parameter of the command: value}: how to run and what to show, and else what the recipe says.
        table: the command, by whose names of options the recipe is made.
    """
    terminal = Terminal(quiet=arguments["quiet"], verbose=arguments["verbose"] > 0, json=arguments["json"])
    options = {
        "MODEL" if name == "model" else f"--{name.replace('_', '-')}": None if value == [] else value
        for name, value in arguments.items()
        if name not in (*_RUN, *_SHOWN)
    }
    options |= {name: options[name] is not False for name in ("--evaluate", "--bench")}

    def load() -> Any:
        from compress.recipe.options import prune_from_options, recipe_from_options

        return {"quantize": recipe_from_options, "prune": prune_from_options}[table](options)

    finish(terminal, lambda: run_recipe(terminal, load, **{name: arguments[name] for name in _RUN}))


def run_recipe(
    terminal: Terminal,
    load: Callable[[], Any],
    *,
    overwrite: bool,
    resume: bool,
    device: str,
    memory: str | None,
    trust_remote_code: bool,
) -> Done:
    """Runs the recipe that `load` gives and shows its report."""
    allowed = parse_memory(memory)
    recipe = load()
    from compress.pipeline.job import Options
    from compress.pipeline.run import run
    from compress.report.text import report_text

    options = Options(
        overwrite=overwrite,
        device=device,
        trust_remote_code=trust_remote_code,
        resume=resume,
        command=typed_command(),
        memory=allowed,
    )
    result = run(recipe, options, terminal)
    report_file = None if result.report_file is None else str(result.report_file)
    terminal.result(report_text(result.report, report_path=report_file))
    verdict = result.report.verdict.model_dump(mode="json")
    return Done(
        exit_code=result.report.verdict.exit_code,
        output=str(result.output),
        report=report_file,
        verdict=verdict,
        measurements=[part.model_dump(mode="json") for part in result.report.measurements],
    )


def run_comparison(
    terminal: Terminal,
    given: Mapping[str, Any],
    command: Literal["eval", "bench"],
    *,
    device: str,
    trust_remote_code: bool,
) -> Done:
    """Measures what the options ask about two models and shows the report."""
    from compress.recipe.options import comparison_from_options

    asked = comparison_from_options(given)
    from compress.pipeline.comparing import compare
    from compress.pipeline.job import Options
    from compress.report.text import report_text

    options = Options(device=device, trust_remote_code=trust_remote_code, command=typed_command())
    compared = compare(asked, command, options, terminal)
    report_file = None if compared.report_file is None else str(compared.report_file)
    terminal.result(report_text(compared.report, report_path=report_file))
    verdict = compared.report.verdict
    return Done(
        exit_code=verdict.exit_code,
        report=report_file,
        verdict=verdict.model_dump(mode="json"),
        measurements=[part.model_dump(mode="json") for part in compared.report.measurements],
    )
