"""Our Q4_0 file in llama.cpp, and against llama.cpp's own rounding to Q4_0.

    python scripts/bench_gguf.py --model FOLDER --models SCRATCH [--second-text brown/test.txt]

`llama.cpp`: the file that `compress quantize --target int4 --format gguf` writes is run in llama.cpp (xllamacpp) on
windows of the package's evaluation text, and its probabilities are compared with those of the dequantized weights
in float32: mean KL in nats, and at how many positions both find the same token likeliest. llama.cpp rounds the inputs
of these layers to 8 bits, which is nearly all of the difference.
`rows`: KL(original || row) of our file and of the same file whose blocks were rounded by llama.cpp's rule (`quantize`
of the package gguf, which gives the bytes of llama.cpp's reference), in float32 on dequantized weights, on the same
tokens; the difference is paired by token, with a 95 % block-bootstrap interval. Both files have the same size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from bench_engine import LENGTH, differences
from bench_quantization import environment, figures
from safetensors.torch import save_file

from compress.data.text import read_corpus
from compress.data.windows import Windows, decoder_windows
from compress.formats.gguf_check import llama_version, longest_prompt, run_llama
from compress.formats.gguf_metadata import model_config
from compress.formats.gguf_names import to_file
from compress.formats.gguf_read import GgufReader
from compress.measure.fidelity import compare_logits
from compress.model.checkpoint import open_checkpoint
from compress.model.gguf_header import GGUF_FILE, read_gguf_header
from compress.model.load import load_original, load_tokenizer
from compress.progress import Silent
from compress.runtime.load import load_reference

WINDOWS, WINDOW = 4, 128
OURS, THEIRS = "default", "llama.cpp's rounding"


def main() -> None:
    arguments = parse()
    ours, theirs = arguments.models / "ours", arguments.models / "theirs"
    seconds = None if ours.exists() else make(arguments, ours)
    texts = {"wiki": read_corpus("default", part="evaluation")}
    if arguments.second_text is not None:
        texts["second domain"] = read_corpus(str(arguments.second_text), part="evaluation")
    tokenizer = load_tokenizer(arguments.model)
    result: dict[str, Any] = {
        "environment": environment() | {"xllamacpp": llama_version()},
        "model": arguments.model.name,
        "settings": {
            "group_size": 32,
            "samples": arguments.samples,
            "length": LENGTH,
            "likeliest": arguments.likeliest,
        },
        "seconds": seconds,
        "bytes": {OURS: (ours / GGUF_FILE).stat().st_size},
    }
    short = decoder_windows(texts["wiki"], tokenizer, length=WINDOW, tokens=WINDOWS * WINDOW)
    result["llama.cpp"] = in_llama(ours, short.ids, arguments)
    print(result["llama.cpp"], flush=True)
    note(result, arguments)
    if arguments.tokens:
        round_as_llama(arguments.model, ours, theirs)
        result["bytes"][THEIRS] = (theirs / GGUF_FILE).stat().st_size
        for name, corpus in texts.items():
            windows = decoder_windows(corpus, tokenizer, length=LENGTH, tokens=arguments.tokens)
            result.setdefault("rows", {})[name] = compare(arguments.model, {OURS: ours, THEIRS: theirs}, windows)
            print(name, result["rows"][name]["minus default"], flush=True)
            note(result, arguments)


def note(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True, help="folder for the files that are made")
    parser.add_argument("--second-text", type=Path)
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--tokens", type=int, default=8192, help="of each text, for the second comparison; 0 for none")
    parser.add_argument("--positions", type=int, default=256, help="compared with llama.cpp")
    parser.add_argument("--likeliest", type=int, default=8192, help="tokens asked for at each of them")
    parser.add_argument("--result", type=Path, default=Path(__file__).with_suffix(".json"))
    return parser.parse_args()


def make(arguments: argparse.Namespace, output: Path) -> float:
    """Our file. Returns the seconds of the whole command."""
    arguments.models.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "compress", "quantize", str(arguments.model), "-o", str(output)]
    command += ["--target", "int4", "--format", "gguf", "--samples", str(arguments.samples)]
    start = time.perf_counter()
    subprocess.run([*command, "--no-evaluate", "--no-bench", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def round_as_llama(model: Path, ours: Path, theirs: Path) -> None:
    """A copy of our folder whose blocks are llama.cpp's rounding of the original's weights."""
    shutil.rmtree(theirs, ignore_errors=True)
    shutil.copytree(ours, theirs)
    original, config, reader = open_checkpoint(model), model_config(model), GgufReader(ours)
    places = {tensor.name: tensor for tensor in read_gguf_header(ours / GGUF_FILE)}
    with (theirs / GGUF_FILE).open("r+b") as file:
        for name, dense in reader.names.items():
            place = places[name]
            if place.dtype not in ("Q4_0", "Q8_0"):
                continue
            weight = to_file(original.model_type, config, dense, original.read(dense).float())
            data = gguf.quantize(weight.contiguous().numpy(), gguf.GGMLQuantizationType[place.dtype]).tobytes()
            assert len(data) == place.nbytes
            file.seek(place.offset)
            file.write(data)


@torch.inference_mode()
def in_llama(folder: Path, windows: Sequence[torch.Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    """The file in llama.cpp against its dequantized weights, on a few windows."""
    model = load_reference(folder, dtype=torch.float32, device="cpu")
    tensors = {f"window.{index}": ids for index, ids in enumerate(windows)}
    for index, ids in enumerate(windows):
        tensors[f"logits.{index}"] = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].contiguous()
    logits = arguments.models / "logits.safetensors"
    save_file(tensors, logits)
    answer = run_llama(
        {
            "file": str(folder / GGUF_FILE),
            "logits": str(logits),
            "threads": torch.get_num_threads(),
            "longest": longest_prompt(folder),
            "most": arguments.positions,
            "likeliest": arguments.likeliest,
        }
    )
    if isinstance(answer, str):
        raise SystemExit(answer)
    return answer


def compare(model: Path, rows: dict[str, Path], windows: Windows) -> dict[str, Any]:
    """Both rows on the same tokens."""
    original = load_original(open_checkpoint(model), dtype=torch.float32, device="cpu")
    found = {}
    for name, folder in rows.items():
        reference = load_reference(folder, dtype=torch.float32, device="cpu")
        found[name] = compare_logits(original, reference, windows, Silent())
    return {
        "figures": {name: figures(tokens) for name, tokens in found.items()},
        "minus default": differences(found)[THEIRS],
    }


if __name__ == "__main__":
    main()
