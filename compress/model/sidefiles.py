"""The files around the weights that make a folder a complete model: an allow-list, copied byte by byte."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from compress.durable import space_for
from compress.errors import MissingResourceError, UsageError

CARD = "README.md"
SOURCE_CARD = "README.original.md"

TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "sentencepiece*.model",
    "spiece.model",
    "source.spm",
    "target.spm",
)
"""Files that hold a vocabulary: without any of them there is no tokenizer."""

SIDE_FILE_PATTERNS = (
    *TOKENIZER_PATTERNS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "video_processor_config.json",
    "feature_extractor_config.json",
    # sentence-transformers: the list of modules and each module's folder. A Dense or LayerNorm module has
    # weights of its own, which are no part of the transformer and without which the folder would not load.
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    CARD,
)
_LEGAL_PATTERNS = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*")
_LEGAL_SUFFIXES = ("", ".TXT", ".MD", ".RST", ".PDF", ".HTML")
_CODE_PATTERNS = ("*.py", "custom_generate/*.py")


def wanted(name: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a file of that name, relative to the model folder and with "/", is a side file to copy."""
    path = PurePosixPath(name)
    if any(part.startswith(".") for part in path.parts):
        return False
    if len(path.parts) == 1 and any(fnmatchcase(name.upper(), pattern) for pattern in _LEGAL_PATTERNS):
        return path.suffix.upper() in _LEGAL_SUFFIXES or path.suffix[1:].isdecimal()
    patterns = (*SIDE_FILE_PATTERNS, *_CODE_PATTERNS) if trust_remote_code else SIDE_FILE_PATTERNS
    return any(_matches(path, pattern) for pattern in patterns)


def side_files(folder: Path, *, trust_remote_code: bool = False) -> list[Path]:
    """The side files of a model folder, relative to it and sorted.

    A card under the name that this tool gives it counts where there is no other: between two steps of a run.
    Links count only when what they point to lies in the folder too (or, for a snapshot in the hub's cache,
    among the blobs of the same repository, which is where that cache keeps every file).
    """
    roots = _allowed_roots(folder)
    candidates = [
        *folder.iterdir(),
        *(path for child in folder.iterdir() if child.is_dir() for path in child.iterdir()),
    ]
    found = []
    for path in candidates:
        relative = path.relative_to(folder)
        name = relative.as_posix()
        renamed = name == SOURCE_CARD and not (folder / CARD).exists()
        if (renamed or wanted(name, trust_remote_code=trust_remote_code)) and _is_inside(path, roots):
            found.append(relative)
    return sorted(found)


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the files in `folder` that hold a vocabulary."""
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in TOKENIZER_PATTERNS)]


def copy_side_files(source_folder: Path, stage: Path, *, trust_remote_code: bool = False) -> list[str]:
    """Copies the side files into `stage`; the source's README.md becomes README.original.md, byte-equal.

    Contents are copied, not links, and the permissions are the umask's. Returns the names in `stage`, sorted.

    Raises:
        UsageError: a side file cannot be read.
        MissingResourceError: `stage` cannot be written.
    """
    names = []
    for relative in side_files(source_folder, trust_remote_code=trust_remote_code):
        name = SOURCE_CARD if relative.as_posix() == CARD else relative.as_posix()
        _copy(source_folder / relative, stage / name)
        names.append(name)
    return sorted(names)


def _copy(source: Path, target: Path) -> None:
    try:
        file = source.open("rb")
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    with file:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with space_for(target, source.stat().st_size), target.open("wb") as copy:
                shutil.copyfileobj(file, copy)
        except OSError as error:
            raise MissingResourceError(
                f"{target} cannot be written: {error.strerror}",
                hint="free some space, or choose another output",
            ) from error


def _matches(path: PurePosixPath, pattern: str) -> bool:
    """Part by part, so that a star never reaches into a subfolder."""
    parts = PurePosixPath(pattern).parts
    return len(parts) == len(path.parts) and all(map(fnmatchcase, path.parts, parts))


def _allowed_roots(folder: Path) -> list[Path]:
    real = folder.resolve()
    roots = [real]
    if real.parent.name == "snapshots" and (blobs := real.parent.parent / "blobs").is_dir():
        roots.append(blobs)
    return roots


def _is_inside(path: Path, roots: Iterable[Path]) -> bool:
    real = path.resolve()
    return real.is_file() and any(real.is_relative_to(root) for root in roots)
