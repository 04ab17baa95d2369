"""What is proved of a GGUF file beside what is proved of every folder: unquantized tensors, and llama.cpp itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from compress.formats.gguf_metadata import context, model_config
from compress.formats.gguf_names import float_type, from_file, stored, to_file
from compress.formats.gguf_read import GgufReader
from compress.formats.proof import ProofCheck, last_words
from compress.model.anatomy import anatomy
from compress.model.checkpoint import Checkpoint
from compress.model.gguf_header import GGUF_FILE

KL_LIMIT = 0.01
"""Mean KL divergence, nats per token, of llama.cpp to the dequantized weights: it rounds the inputs to 8 bits."""
TOP1_LEAST = 0.97
POSITIONS, LIKELIEST = 64, 2048
"""How many next tokens are compared, and over how many tokens of the vocabulary, see `gguf_llama`."""
SECONDS = 1800
_FLOATS = {"F32": torch.float32, "F16": torch.float16}
TEXT = """Hello  world! It's 3 o'clock, we've 12345 apples.

\tNaïve café — 東京 (1999): x_1 = y**2; don't you'll
 😀 ok  """
"""What both tokenizers must read alike: case, numbers, contractions, white space, letters of other scripts."""


def original_faults(stage: Path, original: Checkpoint) -> tuple[list[str], int]:
    """Unquantized tensors, as transformers has them, against the original's, rounded to the type in the file.

    Returns:
        what differs, and how many were compared.

    Raises:
        CompressError: see `GgufReader`.
    """
    reader, tied = GgufReader(stage), anatomy(original).tied
    config, model_type = model_config(stage), original.model_type
    prefix = anatomy(original)
    lacking = "" if prefix.file_prefix else f"{prefix.architecture.base}."
    quantized = {f"{name}.weight" for name in reader.quantized_names}
    state = reader.state_dict(torch.float32)
    faults, count = [], 0
    for name in original.tensors:
        dense = name if name.startswith("lm_head.") else lacking + name
        if not stored(name, tied) or dense in quantized:
            continue
        wanted = to_file(model_type, config, dense, original.read(name))
        rounded = wanted.to(_FLOATS[float_type(tuple(wanted.shape))]).float()
        expected = from_file(model_type, config, dense, rounded)
        found = state.get(dense)
        if found is None:
            faults.append(f"{name} is not in the folder")
        elif not torch.equal(found, expected):
            faults.append(f"{name} differs from the original's")
        count += 1
    return faults, count


def llama_version() -> str | None:
    """Version of the package xllamacpp, or None if it is not installed."""
    return metadata.version("xllamacpp") if find_spec("xllamacpp") is not None else None


def check_llama(stage: Path, logits: Path, threads: int) -> ProofCheck | None:
    """The file, run in llama.cpp, against the measured logits; and its tokenizer against the folder's.

    None where llama.cpp itself cannot be started.
    """
    job = {"file": str(stage / GGUF_FILE), "logits": str(logits), "threads": threads, "longest": longest_prompt(stage)}
    answer = run_llama({**job, "most": POSITIONS, "likeliest": LIKELIEST, **_text(stage)})
    if isinstance(answer, str):
        return ProofCheck("llama.cpp", False, answer)
    if "broken" in answer:
        return None
    kl_mean, top1 = answer["kl_mean"], answer["top1"]
    faults = []
    if not kl_mean <= KL_LIMIT:  # written so that NaN fails
        faults.append(f"allowed is a mean KL of {KL_LIMIT:g}")
    # Rounding inputs turns round what is as good as tied, and of few positions one can be too many.
    if not answer["top1_or_tied"] >= TOP1_LEAST:
        faults.append(f"only {answer['top1_or_tied']:.1%} the same or tied, at least {TOP1_LEAST:.0%} must be")
    if answer["text_equal"] is False:
        faults.append("its tokenizer reads a test text otherwise")
    detail = (
        f"xllamacpp {llama_version()}: mean KL {kl_mean:.3g} nats, likeliest token the same at {top1:.1%} of "
        f"{answer['positions']} positions"
    )
    return ProofCheck("llama.cpp", not faults, "; ".join([detail, *faults]))


def longest_prompt(stage: Path) -> int:
    """The longest prompt that leaves room for a token, in the context that the file states."""
    config = model_config(stage)
    return context(str(config.model_type), config) - 2


def run_llama(job: dict[str, Any]) -> dict[str, Any] | str:
    """The answer of `gguf_llama` in a process of its own, or why there is none."""
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "compress.formats.gguf_llama"],
            input=json.dumps({**job, "parent": os.getpid()}),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"llama.cpp took more than {SECONDS} s"
    if process.returncode != 0:
        return f"llama.cpp does not run the file (exit code {process.returncode}): {last_words(process.stderr)}"
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


def _text(stage: Path) -> dict[str, Any]:
    """The test text and its ids by the folder's own tokenizer."""
    from compress.model.load import load_tokenizer

    return {"text": TEXT, "ids": load_tokenizer(stage)(TEXT)["input_ids"]}
