"""The proof that a written folder is the model that was measured.

It runs in a fresh process (`proof_worker.py`), because the one that wrote the folder still holds what it meant
to write.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import compress
from compress.errors import BrokenResultError, MissingResourceError
from compress.formats.stored import WeightFile
from compress.model.architectures import Kind
from compress.scheme import Scheme

if TYPE_CHECKING:
    import torch

Loader = Literal["stock", "reader"]
_TRACEBACK = "Traceback (most recent call last):"
_BAR = re.compile(r"\d+%\|")
"""A progress bar of tqdm."""


class ProofCrashError(Exception):
    """All that a worker that died had written on stderr; the cause of the error that the user sees."""


@dataclass(frozen=True)
class ProofCheck:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class ProofRecord:
    """What was proved, and how.

    Attributes:
        method: what loaded the folder ("transformers 5.24.0", "independent reader").
        kl_mean: mean KL divergence, in nats per token, from the measured model to the folder; None for
            encoders.
        max_logit_difference: largest difference of an output, as a share of the range of the outputs.
        windows, tokens: what the two were compared on.
    """

    method: str
    checks: tuple[ProofCheck, ...]
    kl_mean: float | None
    max_logit_difference: float | None
    windows: int
    tokens: int

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)


@dataclass(frozen=True)
class ProofJob:
    """What a folder is to be compared with.

    Attributes:
        planned: the weight files that must be there, and nothing else.
        weight_sha256: {module name: hash of the weight, float32 [out, in], little-endian, C order}.
        logits: safetensors file with `window.i` (int64 ids [T]) and `logits.i` (float32 [T, V]) of the
            measured model; for an encoder its last hidden state.
        loader: "stock" transformers, or the independent "reader" where transformers has no loader of its own; see
            `loader_of`.
        source: the original's folder; if given, every tensor that was not quantized must equal the
            original's, rounded at most to the dtype that was planned, config.json must say the same but for
            quantization and cast, and every side file must be there, byte by byte.
        replaced_sha256: {tensor name: hash of the bytes that were planned} of tensors that were written instead of
            the original's, see `stored_sha256`; exactly these may differ from the original's.
        by_block: prove one block at a time by the independent reader, as `proof_blocks` does; `logits` then holds what
            its `meant_outputs` gave.
        config: config.json as planned; None where the original's holds but for quantization and cast.
        names: {tensor name: its name in the original} of all tensors of a model that has lost some; None where all
            are there, under their own names.
    """

    stage: Path
    planned: Sequence[WeightFile]
    weight_sha256: Mapping[str, str]
    logits: Path
    kind: Kind
    loader: Loader
    trust_remote_code: bool = False
    source: Path | None = None
    replaced_sha256: Mapping[str, str] = field(default_factory=dict)
    by_block: bool = False
    config: Mapping[str, Any] | None = None
    names: Mapping[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        """What the worker reads."""
        return {
            "stage": str(self.stage),
            "planned": [
                {
                    "file": shard.file,
                    "nbytes": shard.nbytes,
                    "tensors": {tensor.name: [tensor.dtype, list(tensor.shape)] for tensor in shard.tensors},
                }
                for shard in self.planned
            ],
            "weight_sha256": dict(self.weight_sha256),
            "logits": str(self.logits),
            "kind": self.kind,
            "loader": self.loader,
            "trust_remote_code": self.trust_remote_code,
            "source": None if self.source is None else str(self.source),
            "replaced_sha256": dict(self.replaced_sha256),
            "by_block": self.by_block,
            "config": None if self.config is None else dict(self.config),
            "names": None if self.names is None else dict(self.names),
            "threads": _threads(),
            "parent": os.getpid(),
        }


def prove(job: ProofJob) -> ProofRecord:
    """Loads the folder in a fresh process, in float32, and compares it with what was planned and measured.

    Raises:
        BrokenResultError: a check failed, or the process died; lists what failed.
        MissingResourceError: the process was killed, as it is when memory runs out.
    """
    record = _record(_run(job.as_json()))
    failed = [f"{check.name}: {check.detail}" for check in record.checks if not check.passed]
    if not record.passed:
        raise BrokenResultError(
            f"the written folder failed its proof ({record.method}):\n  " + "\n  ".join(failed),
            hint="Nothing was published. If the disk and the memory are sound, please report this.",
        )
    return record


def prove_all(jobs: Sequence[ProofJob]) -> tuple[ProofRecord, ...]:
    """All of these folders in one fresh process, one record for each; whether it `passed` is for the caller to judge.

    Raises:
        BrokenResultError: the process died; a fault of one folder is a failed check of its record.
        MissingResourceError: as `prove`.
    """
    return tuple(_record(answer) for answer in _run([job.as_json() for job in jobs]))


def loader_of(format_name: str, schemes: Iterable[Scheme]) -> Loader:
    """What loads a folder of this format, whose layers have these schemes: stock transformers wherever it can."""
    found = set(schemes)
    if format_name in ("gptq", "gptq_v2", "gguf"):
        return "reader"
    return "reader" if len(found) > 1 and not all(scheme.symmetric for scheme in found) else "stock"


def stored_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes as they stand in the file: its own dtype, little-endian, C order."""
    import torch

    return hashlib.sha256(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _run(jobs: Mapping[str, Any] | list[dict[str, Any]]) -> Any:
    root = str(Path(compress.__file__).parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        # -P: a file of the user's working directory must not pass for one of ours.
        [sys.executable, "-P", "-m", "compress.formats.proof_worker"],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
        check=False,
    )
    if process.returncode == -signal.SIGKILL:
        raise MissingResourceError(
            "the process that proves the written folder was killed, most likely for want of memory.",
            hint="Close other programs, or run on a machine with more memory.",
        )
    if process.returncode != 0:
        raise BrokenResultError(
            "the written folder failed its proof: the process that loads it ended with exit code "
            f"{process.returncode}: {last_words(process.stderr)}",
            hint="Nothing was published. Run it again with -v for all that the process said.",
        ) from ProofCrashError(process.stderr)
    return json.loads(process.stdout)


def last_words(stderr: str) -> str:
    """The line that says why a process ended: type and message of its last exception, else its last line.

    Bars end without a line break, so a traceback may begin in the middle of a line.
    """
    _, found, tail = stderr.rpartition(_TRACEBACK)
    lines = [line for line in (tail if found else stderr).splitlines() if line.strip() and not _BAR.search(line)]
    if found:
        return next((line for line in lines if not line[0].isspace()), "no further message")
    return lines[-1].strip() if lines else "no further message"


def _record(answer: Mapping[str, Any]) -> ProofRecord:
    checks = tuple(ProofCheck(**check) for check in answer["checks"])
    return ProofRecord(**{**answer, "checks": checks})


def _threads() -> int:
    """The worker uses as many threads as this process, so that sums are taken in the same order."""
    import torch

    return torch.get_num_threads()
