"""The process that loads one model and times it: `python -m compress.measure.latency.worker --threads N --parent PID`.

Reads one JSON request per line on stdin and answers each with one JSON line on stdout; ends when stdin does,
and on Linux at any moment at which the parent ends.
Whatever else writes to stdout in this process is sent to stderr.

    {"op": "load", "folder", "loader", "dtype", "device", "trust_remote_code"}  -> facts of the model
    {"op": "prepare", "kind", "ids", "new_tokens"}                              -> {}
    {"op": "sample"}              -> {"seconds", "cpu_seconds", "contention", "peak_bytes"}
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
from torch import Tensor

import compress
from compress.errors import BrokenResultError, CompressError, UsageError
from compress.measure.latency.contention import observe
from compress.measure.latency.pinning import pin
from compress.orphans import die_with_parent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Clock = Callable[[], float]
WAKE_SECONDS = 0.03
"""Untimed work before every sample: a process that idled while another worked has cold caches and clocks, and the
other's OpenMP threads still spin for some milliseconds. Without it tiny models show two speeds."""


@dataclass
class Session:
    """What one worker holds between requests: at most one model and one prepared way to run and to time it.

    Attributes:
        cpus: those the process is pinned to; None where it is not.
    """

    cpus: list[int] | None = None
    model: PreTrainedModel | None = None
    forward: Callable[[], Any] | None = None
    sample: Callable[[], dict[str, float]] | None = None


def decoder_sample(model: PreTrainedModel, ids: Tensor, new_tokens: int, *, clock: Clock) -> dict[str, float]:
    """Times one greedy generation of exactly `new_tokens` tokens, whatever they are.

    The first token comes from a prefill that computes logits for the last position only; each further one from
    a step with the key-value cache.

    Args:
        ids: int64 [batch, prompt] on the model's device.

    Returns:
        seconds: ttft, e2e and, for two or more tokens, tpot = (e2e - ttft) / (new_tokens - 1).
    """
    last_only, cache = last_position_option(model), cache_name(model)
    synchronize(model.device)
    start = clock()
    output = model(input_ids=ids, use_cache=True, **last_only)
    token = output.logits[:, -1].argmax(dim=-1, keepdim=True)  # [batch, 1]
    synchronize(model.device)
    first = clock()
    for _ in range(new_tokens - 1):
        output = model(input_ids=token, use_cache=True, **{cache: getattr(output, cache)}, **last_only)
        token = output.logits[:, -1].argmax(dim=-1, keepdim=True)
    synchronize(model.device)
    seconds = {"ttft": first - start, "e2e": clock() - start}
    if new_tokens > 1:
        seconds["tpot"] = (seconds["e2e"] - seconds["ttft"]) / (new_tokens - 1)
    return seconds


def encoder_sample(model: PreTrainedModel, ids: Tensor, *, clock: Clock) -> dict[str, float]:
    """Times one forward pass over ids [batch, prompt] with an attention mask of ones."""
    mask = torch.ones_like(ids)
    synchronize(model.device)
    start = clock()
    model(input_ids=ids, attention_mask=mask)
    synchronize(model.device)
    return {"forward": clock() - start}


def wake(forward: Callable[[], Any], device: torch.device, *, clock: Clock) -> None:
    """Runs the prompt again and again, at least once, until WAKE_SECONDS have passed."""
    start = clock()
    while True:
        forward()
        synchronize(device)
        if clock() - start >= WAKE_SECONDS:
            return


def last_position_option(model: PreTrainedModel) -> dict[str, int]:
    """The argument that keeps only the last position's logits, for models that have it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def cache_name(model: PreTrainedModel) -> str:
    """What the model calls its key-value cache, as argument and in its output: transformers 5 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what was queued; the CPU queues nothing."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_bytes() -> int | None:
    """Peak resident memory of this process so far; None where the system does not tell.

    On Linux this is VmHWM, because ru_maxrss survives exec and so may be the parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = (line.split() for line in status.read_text(encoding="ascii", errors="replace").splitlines())
        return next((int(line[1]) * 1024 for line in lines if line and line[0] == "VmHWM:"), None)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def load(request: dict[str, Any], session: Session) -> dict[str, Any]:
    """Loads the model and tells what the parent needs to make a prompt and to label the numbers."""
    folder, dtype = Path(request["folder"]), getattr(torch, request["dtype"])
    options = {"dtype": dtype, "device": request["device"], "trust_remote_code": request["trust_remote_code"]}
    loader, engine = loader_of(request["loader"])
    start = time.perf_counter()
    session.model = model = loader(folder, **options)
    synchronize(model.device)
    seconds = time.perf_counter() - start
    config = model.config.get_text_config()
    embeddings = cast(torch.nn.Embedding, model.get_input_embeddings())
    special: set[int] = set()
    for name in ("pad", "bos", "eos"):
        found = getattr(config, f"{name}_token_id", None)
        special.update(found if isinstance(found, list) else () if found is None else (found,))
    return {
        "engine": engine,
        "seconds": seconds,
        "peak_bytes": peak_bytes(),
        "cpus": session.cpus,
        "device": str(model.device),
        "vocabulary": embeddings.weight.shape[0],
        "positions": getattr(config, "max_position_embeddings", None),
        "special": sorted(special),
    }


def loader_of(name: str) -> tuple[Callable[..., PreTrainedModel], str]:
    """The function that loads a folder, everything it needs imported, and what it is in words."""
    if name == "stock":
        import transformers

        from compress.model.checkpoint import open_checkpoint
        from compress.model.load import load_original

        def stock(folder: Path, **options: Any) -> PreTrainedModel:
            return load_original(open_checkpoint(folder), **options)

        return stock, f"transformers {transformers.__version__}"
    # Imported here only: what it brings would count as peak memory of the stock loader too.
    from compress.runtime.load import load_reference

    return load_reference, f"compress {compress.__version__}, dequantized weights"


def prepare(request: dict[str, Any], session: Session) -> dict[str, Any]:
    """Fixes what one sample is and runs the prompt once, untimed, to see that the output is finite."""
    model = session.model
    if model is None:
        raise UsageError("prepare before load")
    ids = torch.tensor(request["ids"], device=model.device)
    if request["kind"] == "decoder":
        options: dict[str, Any] = last_position_option(model)
        session.sample = lambda: decoder_sample(model, ids, request["new_tokens"], clock=time.perf_counter)
    else:
        options = {"attention_mask": torch.ones_like(ids)}
        session.sample = lambda: encoder_sample(model, ids, clock=time.perf_counter)
    session.forward = lambda: model(input_ids=ids, **options)
    if not bool(session.forward()[0].isfinite().all()):
        raise BrokenResultError(
            f"the output is not finite in {str(model.dtype).removeprefix('torch.')}",
            hint="the values may overflow this dtype; measure in bfloat16 or float32",
        )
    return {}


def take_sample(request: dict[str, Any], session: Session) -> dict[str, Any]:
    del request
    if session.model is None or session.forward is None or session.sample is None:
        raise UsageError("sample before prepare")
    wake(session.forward, session.model.device, clock=time.perf_counter)
    seconds, cpu_seconds, contention = observe(session.sample, session.cpus)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "contention": contention, "peak_bytes": peak_bytes()}


OPERATIONS = {"load": load, "prepare": prepare, "sample": take_sample}


def serve(requests: TextIO, replies: TextIO, cpus: list[int] | None = None) -> None:
    """Answers until `requests` ends. Expected errors become replies; any other ends the process."""
    session = Session(cpus)
    for line in requests:
        request = json.loads(line)
        try:
            reply = OPERATIONS[request["op"]](request, session)
        except CompressError as error:
            reply = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the one that started this")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    cpus = pin(arguments.threads)
    torch.set_num_threads(arguments.threads)
    # The replies keep the pipe to themselves: a library that prints must not break the protocol.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies, torch.inference_mode():
        os.dup2(2, 1)
        serve(sys.stdin, replies, cpus)


if __name__ == "__main__":
    main()
