"""The process that runs a GGUF file in llama.cpp (package xllamacpp): a job in JSON on stdin, figures on stdout.

A process of its own, because a fault in native code ends it.

    job      file, logits (see `proof.prove`), threads, longest (the longest prompt that the context takes), most (how
             many positions to compare), likeliest (how many tokens to ask for at each), text and ids (what the
             tokenizer must make of it), parent
    answer   broken (why the package cannot be imported), or: positions, kl_mean (nats, from the measured logits to
             llama.cpp's), top1 (share of positions where both find the same token likeliest), top1_or_tied (the same,
             or ours has theirs within 0.3 nats of its best), text_equal (None without a text)

The divergence is taken over the tokens that llama.cpp finds likeliest and all others as one, which is a little less
than that over all, and the same where all are asked for: an answer of 260,000 tokens takes seconds. The server answers
with the probabilities of one next token, so a window is given again and again, a token longer each time; what it has
seen before it keeps in its cache.
"""

from __future__ import annotations

import json
import math
import os
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from compress.orphans import die_with_parent

_TIE = 0.3
"""Nats. A mean KL of 0.01 goes with logits that differ by 0.14 (root mean square); this is twice as much."""
_LOWEST = -87.0
"""Logarithm of the smallest probability that float32 keeps; llama.cpp answers -inf below it."""


def main() -> None:
    answer_to = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # llama.cpp prints
    job = json.load(sys.stdin)
    die_with_parent(job["parent"])
    try:
        import xllamacpp  # noqa: F401 - an installation that is broken says nothing of the file
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        answer = {"broken": str(error)}
    else:
        answer = run(job)
    with answer_to:
        json.dump(answer, answer_to)
    answer_to.close()
    os._exit(0)  # the server's threads would otherwise be torn down while they wait


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of one job."""
    windows = _windows(Path(job["logits"]))
    server = start(Path(job["file"]), int(job["threads"]), max(len(ids) for ids, _ in windows) + 8)
    divergence, same, tied, positions = 0.0, 0, 0, 0
    plain = tokens_of(server, " a")[-1]
    each = max(1, int(job["most"]) // len(windows))
    for whole, logits in windows:
        ids = whole[: int(job["longest"])]
        step = -(-len(ids) // each)
        for position in range(step - 1, len(ids), step):
            ours = torch.log_softmax(logits[position].double(), dim=-1)
            found, theirs = next_token(server, ids[: position + 1], min(int(job["likeliest"]), len(ours)), plain)
            divergence += lumped_kl(ours, found, theirs)
            best = found[theirs.argmax()]
            same += int(ours.argmax() == best)
            tied += int(float(ours.max() - ours[best]) < _TIE)
            positions += 1
    text = job.get("text")
    equal = None if text is None else tokens_of(server, text) == list(job["ids"])
    return {
        "positions": positions,
        "kl_mean": divergence / positions,
        "top1": same / positions,
        "top1_or_tied": tied / positions,
        "text_equal": equal,
    }


def start(file: Path, threads: int, context: int) -> Any:
    """llama.cpp's server for one file, on the CPU."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = context
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.fit_params = False
    params.verbosity = 0
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def lumped_kl(ours: torch.Tensor, found: torch.Tensor, theirs: torch.Tensor) -> float:
    """KL divergence in nats, the tokens that are not in `found` taken as one.

    Args:
        ours: logarithms of all probabilities, float64 [V].
        found: ids [K], and `theirs`, their logarithms with llama.cpp, float64 [K].
    """
    mine = ours[found]
    divergence = float((mine.exp() * (mine - theirs)).sum())
    rest = max(1 - float(mine.exp().sum()), 0.0)
    if len(found) == len(ours) or rest == 0:
        return divergence
    other = max(1 - float(theirs.exp().sum()), math.exp(_LOWEST))
    return divergence + rest * (math.log(rest) - math.log(other))


def next_token(server: Any, ids: list[int], likeliest: int, plain: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens after `ids` with llama.cpp: ids [K] and logarithms of probabilities, float64 [K].

    Args:
        plain: a token that is whole letters. It is the one that is made: an end of text, or a piece of a letter,
            would come without probabilities.
    """
    request = {
        "prompt": ids,
        "n_predict": 1,
        "n_probs": likeliest,
        "cache_prompt": True,
        "temperature": 0.0,
        "logit_bias": [[plain, 1e6]],  # the probabilities are those before it
    }
    answer = server.handle_completions(request)
    if "choices" not in answer:
        raise RuntimeError(f"the server answers {str(answer)[:300]}")
    found = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    if any(entry["logprob"] is None for entry in found):  # JSON has no NaN
        raise RuntimeError(
            f"its probabilities after {len(ids)} tokens are not numbers; keys and values above 65504 do not fit into "
            "its float16 cache"
        )
    logarithms = torch.tensor([entry["logprob"] for entry in found], dtype=torch.float64)
    return torch.tensor([entry["id"] for entry in found]), logarithms.clamp(min=_LOWEST)


def tokens_of(server: Any, text: str) -> list[int]:
    """What llama.cpp's tokenizer makes of a text, special tokens added as the file says."""
    body = json.dumps({"content": text, "add_special": True}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.listening_address}/tokenize", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [int(token) for token in json.load(answer)["tokens"]]


def _windows(path: Path) -> list[tuple[list[int], torch.Tensor]]:
    """(ids, measured logits [T, V]) of each window."""
    with safe_open(path, framework="pt") as file:
        names = sorted(name for name in file.keys() if name.startswith("window."))  # noqa: SIM118 - no mapping
        return [
            (file.get_tensor(name).reshape(-1).tolist(), file.get_tensor(name.replace("window", "logits")))
            for name in names
        ]


if __name__ == "__main__":
    main()
