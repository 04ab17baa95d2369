"""From what the user calls MODEL to a checkpoint: a local folder, or a model on the Hugging Face hub.

A hub model is pinned to its commit first. The plan then reads only config.json and the safetensors headers; a run
downloads the weights and the side files that would be copied, and nothing else. What is cached works offline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import cast

from compress.errors import CompressError, MissingResourceError, UsageError
from compress.model.architectures import of_bare_file
from compress.model.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    TensorInfo,
    no_weights,
    open_checkpoint,
    parse_config,
    parse_index,
)
from compress.model.safetensors_header import DTYPE_BITS
from compress.model.sidefiles import TOKENIZER_PATTERNS, wanted

_TIMEOUT = 30.0
"""Seconds to wait for the hub's first answer."""

_VOCABULARY = (*TOKENIZER_PATTERNS, "tokenizer_config.json", "chat_template.*", "generation_config.json")

_WINDOWS_DRIVE = re.compile(r"^[A-Za-z]:")


@dataclass(frozen=True)
class _Wish:
    """What was asked for: `model` as the user wrote it, taken apart."""

    model: str
    name: str
    revision: str | None
    cache: Path | None


@dataclass(frozen=True)
class _Repository:
    """A hub model at one commit. `folder` is its snapshot in the cache; `files` has the size of every file."""

    wish: _Wish
    commit: str
    folder: Path
    files: Mapping[str, int]


def is_local(model: str) -> bool:
    """Whether MODEL means a folder: it exists, or it is written like a path and not like `org/name`."""
    return (
        _exists(model)
        or model.startswith((".", "/", "~"))
        or "\\" in model
        or _WINDOWS_DRIVE.match(model) is not None
        or model.split("@")[0].count("/") > 1
    )


def _exists(model: str) -> bool:
    try:
        return Path(model).expanduser().exists()
    except (OSError, RuntimeError):  # too long for a file name, or `~somebody` who is not here
        return False


def _local_folder(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        raise MissingResourceError(f"{model}: {error}", hint="check the path") from error


def resolve(model: str, *, weights: bool, cache: Path | None = None, trust_remote_code: bool = False) -> Checkpoint:
    """The checkpoint that MODEL names: a folder, or a hub id `org/name[@revision]`.

    Args:
        weights: False reads config.json and the headers only, and the checkpoint has `has_weights=False`
            unless the weights are in the cache already.
        cache: the hub's cache folder; None is huggingface_hub's own (HF_HOME).
        trust_remote_code: download the model's *.py files too.

    Raises:
        MissingResourceError: no such folder or model or revision, no access, no connection and nothing cached.
        UsageError: the model holds no safetensors weights, or is damaged.
    """
    if is_local(model):
        return open_checkpoint(_local_folder(model), source=model)
    name, _, revision = model.partition("@")
    if "@" in model and not revision:
        raise MissingResourceError(f"{model}: no revision after the @", hint="write org/name@revision")
    wish = _Wish(model, name, revision or None, cache)
    try:
        with _hub_errors(model):
            repository = _pin(wish)
            shards = _shards(repository)
            if not weights:
                return _from_headers(repository, shards)
            others = [file for file in repository.files if _is_side_file(file, trust_remote_code)]
            _download(repository, [*shards, *others])
    except _OfflineError as offline:
        return _from_cache(wish, offline)
    return open_checkpoint(repository.folder, source=model, revision=repository.commit)


def tokenizer_folder(checkpoint: Checkpoint) -> Path:
    """Where the tokenizer's files are; those of a hub model whose headers alone were read are fetched now.

    Raises:
        MissingResourceError: the hub cannot be reached.
    """
    if checkpoint.has_weights or checkpoint.revision is None:
        return checkpoint.folder
    from huggingface_hub import snapshot_download

    name, cache = checkpoint.source.partition("@")[0], checkpoint.folder.parents[2]
    with _hub_errors(checkpoint.source):
        return Path(
            snapshot_download(
                name, revision=checkpoint.revision, cache_dir=cache, allow_patterns=[CONFIG_FILE, *_VOCABULARY]
            )
        )


class _OfflineError(MissingResourceError):
    """The hub cannot be reached; a copy in the cache may still do."""


def _pin(wish: _Wish) -> _Repository:
    """Finds the commit and its files, and fetches config.json.

    `model_info` comes first because it is the one call that fails at once without a connection. config.json is
    fetched by the revision's own name, so that the cache learns which commit that is and works offline later.
    """
    from huggingface_hub import HfApi, hf_hub_download

    api = HfApi()
    info = api.model_info(wish.name, revision=wish.revision, files_metadata=True, timeout=_TIMEOUT)
    config = Path(hf_hub_download(wish.name, CONFIG_FILE, revision=wish.revision, cache_dir=wish.cache))
    parse_config(config)
    commit = config.parent.name
    if commit != info.sha:  # somebody has pushed between the two requests
        info = api.model_info(wish.name, revision=commit, files_metadata=True, timeout=_TIMEOUT)
    files = {file.rfilename: file.size or 0 for file in info.siblings or []}
    return _Repository(wish, commit, config.parent, files)


def _shards(repository: _Repository) -> list[str]:
    """The weight files, chosen as in a folder: one file, else what the index names."""
    from huggingface_hub import hf_hub_download

    wish, files = repository.wish, repository.files
    if SINGLE_FILE in files:
        return [SINGLE_FILE]
    if INDEX_FILE not in files:
        raise no_weights(wish.model, files)
    index = hf_hub_download(wish.name, INDEX_FILE, revision=repository.commit, cache_dir=wish.cache)
    shards = sorted(set(parse_index(Path(index)).values()))
    if missing := [shard for shard in shards if shard not in files]:
        raise UsageError(f"{wish.model}: {INDEX_FILE} names files that are not there: {', '.join(missing)}")
    return shards


def _from_headers(repository: _Repository, shards: list[str]) -> Checkpoint:
    model = repository.wish.model
    if all((repository.folder / shard).exists() for shard in shards):
        return open_checkpoint(repository.folder, source=model, revision=repository.commit)
    tensors = [tensor for shard in shards for tensor in _remote_header(repository, shard)]
    if unknown := sorted({tensor.dtype for tensor in tensors} - set(DTYPE_BITS)):
        raise UsageError(f"{model} holds tensors of unknown dtypes: {', '.join(unknown)}")
    return Checkpoint(
        folder=repository.folder,
        config=of_bare_file(parse_config(repository.folder / CONFIG_FILE), (tensor.name for tensor in tensors)),
        tensors={tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.name)},
        shard_bytes={shard: repository.files[shard] for shard in shards},
        source=model,
        revision=repository.commit,
        has_weights=False,
    )


def _remote_header(repository: _Repository, shard: str) -> Iterator[TensorInfo]:
    """One shard's tensors, through range requests for the header's bytes only."""
    from huggingface_hub import HfApi

    name, commit = repository.wish.name, repository.commit
    header = HfApi().parse_safetensors_file_metadata(name, shard, revision=commit)
    for tensor_name, tensor in header.tensors.items():
        yield TensorInfo(tensor_name, str(tensor.dtype), tuple(tensor.shape), shard)


def _is_side_file(name: str, trust_remote_code: bool) -> bool:
    return name == INDEX_FILE or wanted(name, trust_remote_code=trust_remote_code)


def _download(repository: _Repository, names: list[str]) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(
        repository.wish.name,
        revision=repository.commit,
        cache_dir=repository.wish.cache,
        allow_patterns=[escape(name) for name in names],
    )


def _from_cache(wish: _Wish, offline: _OfflineError) -> Checkpoint:
    """The cached snapshot, if its weights are there in full."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = hf_hub_download(
            wish.name, CONFIG_FILE, revision=wish.revision, cache_dir=wish.cache, local_files_only=True
        )
    except LocalEntryNotFoundError:
        raise MissingResourceError(f"{offline.message}, and it is not in the cache", hint=offline.hint) from offline
    folder = Path(path).parent
    try:
        return open_checkpoint(folder, source=wish.model, revision=folder.name)
    except UsageError as error:
        raise MissingResourceError(
            f"{offline.message}, and the cache holds only a part of it ({folder})", hint=offline.hint
        ) from error


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into one sentence and the way out."""
    from huggingface_hub import errors

    # HfHubHTTPError derives from the HTTPError of the HTTP library in use (httpx in 1.x, httpx2 since); that class
    # covers refused connections and time-outs, which huggingface_hub passes through as they are.
    network_error = cast(type[Exception], errors.HfHubHTTPError.__bases__[0])
    expected = (OSError, network_error, errors.HFValidationError, errors.SafetensorsParsingError)
    try:
        yield
    except expected as error:
        raise _explain(error, model) from error


def _explain(error: BaseException, model: str) -> CompressError:
    from huggingface_hub import errors

    name, _, revision = model.partition("@")
    table: list[tuple[type[BaseException], Callable[[], CompressError]]] = [
        (
            errors.HFValidationError,
            lambda: MissingResourceError(
                f"{model} is neither a folder here nor a hub id: {error}",
                hint="write org/name, org/name@revision, or a path that starts with ./",
            ),
        ),
        (
            errors.GatedRepoError,
            lambda: MissingResourceError(
                f"{name} is gated: its licence has to be accepted first",
                hint=f"accept it at https://huggingface.co/{name}, then log in with `hf auth login` (or set HF_TOKEN)",
            ),
        ),
        (
            errors.RevisionNotFoundError,
            lambda: MissingResourceError(
                f"{name} has no revision {revision!r}", hint="name a branch, a tag or a commit of the model"
            ),
        ),
        (
            errors.RepositoryNotFoundError,
            lambda: MissingResourceError(
                f"there is no folder {model} here and no model {name} on the hub, or it is private",
                hint="check the spelling; for a private model log in with `hf auth login` (or set HF_TOKEN)",
            ),
        ),
        (
            errors.RemoteEntryNotFoundError,
            lambda: UsageError(f"{model} has no {CONFIG_FILE}", hint="name a model made for transformers"),
        ),
        (errors.SafetensorsParsingError, lambda: UsageError(f"{model}: a safetensors header is damaged: {error}")),
    ]
    for kind, explanation in table:
        if isinstance(error, kind):
            return explanation()
    return _OfflineError(
        f"{model} cannot be fetched from the hub ({_first_line(error)})",
        hint="check the connection (HF_HUB_OFFLINE, HF_ENDPOINT); or download the model on a connected machine "
        f"(`hf download {name}`) and pass the folder, or copy that machine's cache and set HF_HOME",
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
