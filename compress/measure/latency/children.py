"""The parent's side of `compress.measure.latency.worker`: starts the processes, asks them, and always ends them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compress import errors
from compress.errors import CompressError, MissingResourceError

TAIL_BYTES = 4_000
END_SECONDS = 10


@dataclass(frozen=True)
class Child:
    """One running worker. `log` is its stderr, a nameless temporary file."""

    label: str
    process: subprocess.Popen[str]
    log: IO[bytes]


@contextmanager
def children(labels: Sequence[str], threads: int) -> Iterator[list[Child]]:
    """One worker per label, all idle. They are killed on the way out, whatever the way."""
    with ExitStack() as stack:
        yield [stack.enter_context(_running(label, threads)) for label in labels]


def ask(child: Child, request: Mapping[str, Any]) -> dict[str, Any]:
    """Sends one request and waits for the reply.

    Raises:
        CompressError: what the worker answered (its own class, hint kept), or that it died, with the end of its
            stderr.
    """
    assert child.process.stdin is not None
    assert child.process.stdout is not None
    try:
        child.process.stdin.write(json.dumps(request) + "\n")
        child.process.stdin.flush()
        line = child.process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        raise _death(child)
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        kind = getattr(errors, reply["error"])
        raise kind(f"{child.label}: {reply['message']}", hint=reply["hint"])
    return reply


@contextmanager
def _running(label: str, threads: int) -> Iterator[Child]:
    package_root = str(Path(errors.__file__).parent.parent)
    search = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    count = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "compress.measure.latency.worker",
                "--threads",
                str(threads),
                "--parent",
                str(os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=os.environ | count | {"PYTHONPATH": os.pathsep.join(search), "TOKENIZERS_PARALLELISM": "false"},
            # Ctrl-C reaches the parent alone, which then ends the children: no traceback of theirs in between.
            start_new_session=True,
        )
        try:
            yield Child(label, process, log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(END_SECONDS)
    for pipe in (process.stdin, process.stdout):
        # A request that the dead worker never read is still in the buffer, and closing tries to send it.
        with suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()


def _death(child: Child) -> CompressError:
    code = child.process.wait(END_SECONDS)
    child.log.seek(max(0, child.log.seek(0, os.SEEK_END) - TAIL_BYTES))
    tail = child.log.read().decode("utf-8", errors="replace").strip() or "(it wrote nothing to stderr)"
    if code < 0:
        return MissingResourceError(
            f"{child.label}: the measuring process was killed by signal {-code}\n{tail}",
            hint="signal 9 usually means that memory ran out: all variants are loaded at the same time",
        )
    return CompressError(f"{child.label}: the measuring process ended with code {code}\n{tail}")
