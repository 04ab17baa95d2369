from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from commandline import base_environment, compress
from safetensors import SafetensorError

from compress.cli.boundary import Done, run_guarded
from compress.cli.terminal import Terminal
from compress.errors import (
    BrokenResultError,
    CompressError,
    MissingResourceError,
    NoisyMachineError,
    Problem,
    RecipeError,
    UsageError,
)

KEYS = ["output", "report", "verdict", "exit_code", "measurements", "error"]


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def function() -> NoReturn:
        raise error

    return function


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


EXPECTED = [
    (UsageError("no such target"), 2),
    (MissingResourceError("no model"), 9),
    (NoisyMachineError("noise"), 8),
    (BrokenResultError("not finite"), 10),
    (CompressError("something"), 1),
    (KeyboardInterrupt(), 130),
    (MemoryError(), 9),
    (OutOfMemoryError("CUDA out of memory"), 9),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), 9),
    (OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors"), 9),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 9),
    (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 9),
    (SafetensorError("I/O error: Permission denied (os error 13)"), 9),
    (RuntimeError("[enforce fail at inline_container.cc:820] . No space left on device"), 9),
    (SafetensorError("Error while deserializing header: invalid UTF-8"), 1),
    (PermissionError(errno.EACCES, "Permission denied", "/root/out"), 9),
    (FileNotFoundError(errno.ENOENT, "No such file", "x"), 1),
    (RuntimeError("shape mismatch"), 1),
    (AssertionError(), 1),
]


@pytest.mark.parametrize(("error", "code"), EXPECTED, ids=lambda value: type(value).__name__)
def test_every_exception_has_its_exit_code(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(Terminal(), raising(error)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") or error.args == ()
    assert "Traceback" not in captured.err


def test_message_and_hint_reach_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    run_guarded(Terminal(), raising(UsageError("what, where, the rule", hint="the way out")))
    assert capsys.readouterr().err == "error: what, where, the rule\nhint: the way out\n"


def test_a_full_disk_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    run_guarded(Terminal(), raising(OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors")))
    assert "out/model.safetensors: No space left on device" in capsys.readouterr().err


def test_a_bug_says_so_and_how_to_report_it(capsys: pytest.CaptureFixture[str]) -> None:
    run_guarded(Terminal(), raising(KeyError("weight")))
    shown = capsys.readouterr().err
    assert "this is a bug in compress: KeyError: 'weight'" in shown
    assert "-v" in shown
    assert "compress doctor" in shown


def test_traceback_with_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    run_guarded(Terminal(verbose=True), raising(KeyError("weight")))
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_json_of_a_success_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(json=True)

    def command() -> Done:
        sys.stdout.write("a library talks\n")
        terminal.result("a table")
        return Done(3, output="out", report="out/report/report.json", verdict={"outcome": "FAIL"})

    assert run_guarded(terminal, command) == 3
    data = json.loads(capsys.readouterr().out)
    assert list(data) == KEYS
    assert data["exit_code"] == 3
    assert data["verdict"] == {"outcome": "FAIL"}
    assert data["error"] is None


def test_json_of_a_failure_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem("recipe.yaml", 3, 5, "steps", "unknown key")
    code = run_guarded(Terminal(json=True), raising(RecipeError([problem], hint="see compress schema")))
    data = json.loads(capsys.readouterr().out)
    assert list(data) == KEYS
    assert data["exit_code"] == code == 2
    assert data["error"]["message"] == "recipe.yaml:3:5: steps: unknown key"
    assert data["error"]["hint"] == "see compress schema"
    assert data["error"]["problems"] == [
        {"file": "recipe.yaml", "line": 3, "column": 5, "path": "steps", "message": "unknown key"}
    ]


def test_sigterm_ends_a_command_as_an_interrupt() -> None:
    code = textwrap.dedent("""
        import sys, time
        from compress.cli.boundary import run_guarded
        from compress.cli.terminal import Terminal
        def command():
            try:
                print("ready", file=sys.stderr, flush=True)
                time.sleep(60)
            finally:
                print("cleaned up", file=sys.stderr)
        sys.exit(run_guarded(Terminal(), command))
    """)
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert child.stderr is not None
    assert child.stderr.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    rest = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 130
    assert rest.startswith("cleaned up\nerror: interrupted")


def test_the_handler_of_sigterm_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_guarded(Terminal(quiet=True), Done)
    assert signal.getsignal(signal.SIGTERM) is before


FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


def with_full(stream: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`compress ARGUMENTS` with one stream, or "both", on a disk that is full."""
    with FULL.open("w") as full:
        return subprocess.run(
            [sys.executable, "-m", "compress", *arguments],
            stdout=full if stream in ("stdout", "both") else subprocess.PIPE,
            stderr=full if stream in ("stderr", "both") else subprocess.PIPE,
            text=True,
            env=base_environment(),
            check=False,
            timeout=120,
        )


@needs_full
@pytest.mark.parametrize("arguments", [("schema",), ("schema", "--json"), ("--help",), ("--version",), ("run", "-h")])
def test_a_full_stdout_is_one_error(arguments: tuple[str, ...]) -> None:
    done = with_full("stdout", *arguments)
    assert done.returncode == 9
    assert done.stderr.startswith("error: the result cannot be written to stdout: No space left on device\nhint: ")
    assert done.stderr.count("\n") == 2


@needs_full
def test_json_on_a_full_stdout_ends_with_nine(capsys: pytest.CaptureFixture[str]) -> None:
    with FULL.open("w") as full:
        sys_stdout, sys.stdout = sys.stdout, full
        try:
            code = run_guarded(Terminal(json=True), Done)
        finally:
            sys.stdout = sys_stdout
    assert code == 9
    assert capsys.readouterr().err.startswith("error: the result cannot be written")


@needs_full
@pytest.mark.parametrize("stream", ["stderr", "both"])
@pytest.mark.parametrize("arguments", [("run", "no.yaml"), ("schema", "--bad"), ("run", "no.yaml", "--json", "-v")])
def test_a_full_stderr_keeps_the_exit_code(stream: str, arguments: tuple[str, ...]) -> None:
    assert with_full(stream, *arguments).returncode == 2


@needs_full
def test_a_full_stdout_keeps_the_exit_code_of_a_failure() -> None:
    done = with_full("stdout", "run", "no.yaml", "--json")
    assert done.returncode == 2
    assert "error: there is no recipe file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("quantize", "m", "--samples", "x", "--json"), "--samples"),
        (("run", "r.yaml", "--json", "--frobnicate"), "--frobnicate"),
        (("plan", "--json"), "RECIPE"),
        (("frobnicate", "--json"), "frobnicate"),
        (("schema", "--json", "more"), "more"),
    ],
)
def test_json_of_a_wrong_option_is_one_object(arguments: tuple[str, ...], words: str) -> None:
    done = compress(*arguments)
    data = json.loads(done.stdout)
    assert list(data) == KEYS
    assert data["exit_code"] == done.returncode == 2
    assert words in data["error"]["message"]
    assert done.stderr.startswith("Usage: ")


def test_a_wrong_option_without_json_leaves_stdout_alone() -> None:
    done = compress("run", "--", "r.yaml", "--json")
    assert done.returncode == 2
    assert done.stdout == ""


def test_the_schema_is_json_anyway() -> None:
    assert compress("schema", "--json").stdout == compress("schema").stdout
