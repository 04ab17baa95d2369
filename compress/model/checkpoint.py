"""A Hugging Face model folder, seen through its config and the headers of its safetensors files.

Opening reads no weight and imports no torch; tensors are read by name when somebody asks for one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from compress.errors import MissingResourceError, UsageError
from compress.model.architectures import of_bare_file
from compress.model.gguf_header import GGUF_FILE, read_gguf_header
from compress.model.json_text import parse_json
from compress.model.safetensors_header import HeaderError, TensorInfo, read_header

if TYPE_CHECKING:
    import torch

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "no_weights",
    "open_checkpoint",
    "parse_config",
    "parse_index",
    "read_json_object",
]

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_AGAIN = "fetch or save the model again; a copy that was cut short looks like this"
_FOREIGN_SUFFIXES = (".gguf", ".h5", ".msgpack", ".onnx", ".safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A model folder.

    Attributes:
        folder: where the files are; for a hub model the snapshot in the hub's cache.
        config: config.json, as stored, but see `of_bare_file`.
        tensors: by name, sorted; as the files hold them.
        shard_bytes: size of each weight file by name, headers included.
        source: the model as the user wrote it.
        revision: commit of the hub, None for a plain folder.
        has_weights: False when only headers were read from the hub; then `read` and the hashes are refused.
        quantized: the model whose dequantized weights these are, None for others. Its hash is this one's.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shard_bytes: Mapping[str, int]
    source: str
    revision: str | None = None
    has_weights: bool = True
    quantized: Checkpoint | None = None

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def positions(self) -> int | None:
        """Longest input in tokens, where the config states one. RoBERTa's kin count from the padding id + 1.

        Raises:
            UsageError: the number leaves no position for a token.
        """
        stated = self.config.get("max_position_embeddings") or self.config.get("n_positions")
        if not isinstance(stated, int):
            return None
        taken = 0
        if self.model_type in ("roberta", "xlm-roberta"):
            padding = self.config.get("pad_token_id")
            taken = 1 + (padding if isinstance(padding, int) else 0)
        elif self.model_type == "mpnet":
            taken = 2  # its class takes 1 for the padding id
        if stated <= taken:
            raise UsageError(
                f"{self.source}: config.json gives {self.model_type} {stated} positions; {taken + 1} is the least.",
                hint="correct max_position_embeddings (n_positions), or fetch the model again",
            )
        return stated - taken

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight files on disk, headers included."""
        return sum(self.shard_bytes.values())

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are in a GGUF file; then `tensors` has that file's names, types and order of rows."""
        return GGUF_FILE in self.shard_bytes

    @property
    def is_quantized(self) -> bool:
        """Whether config.json says that some tool has quantized these weights already, or they are in a GGUF file."""
        return self.is_gguf or any(self.config.get(key) for key in ("quantization_config", "compression_config"))

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in the dtype and shape of the file.

        Raises:
            UsageError: no such tensor, or only the headers were fetched.
        """
        return self.read_many([name])[name]

    def read_many(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Several tensors, in the given order; each file is opened once. Errors as for `read`.

        They are in memory of their own and never mapped from the file, whose pages would stay with the process.
        Blocks of codes in a GGUF file come dequantized, in float32.
        """
        wanted = list(names)
        self._require_weights()
        if unknown := [name for name in wanted if name not in self.tensors]:
            raise UsageError(f"{self.folder} holds no tensor named {', '.join(unknown)}")
        if self.is_gguf:
            from compress.model.gguf_tensors import read_tensors as read_gguf

            return read_gguf(self.folder / GGUF_FILE, [self.tensors[name] for name in wanted])
        from compress.model.tensor_file import read_tensors

        by_shard: dict[str, list[TensorInfo]] = defaultdict(list)
        for name in wanted:
            by_shard[self.tensors[name].shard].append(self.tensors[name])
        found: dict[str, torch.Tensor] = {}
        for shard, members in by_shard.items():
            found |= read_tensors(self.folder / shard, members)
        return {name: found[name] for name in wanted}

    def file_hashes(self) -> dict[str, str]:
        """SHA-256 of config.json and of every weight file, by name."""
        self._require_weights()
        names = [CONFIG_FILE, *sorted(self.shard_bytes)]
        return {name: _sha256(self.folder / name) for name in names}

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over the lines "hash name" of `file_hashes`: equal for equal config and weights. Computed once."""
        if self.quantized is not None:
            return self.quantized.content_hash
        lines = "".join(f"{digest} {name}\n" for name, digest in self.file_hashes().items())
        return hashlib.sha256(lines.encode()).hexdigest()

    def _require_weights(self) -> None:
        if not self.has_weights:
            raise UsageError(
                f"only the headers of {self.source} were fetched, not its weights",
                hint="resolve the model with weights=True",
            )


def open_checkpoint(folder: Path, source: str | None = None, *, revision: str | None = None) -> Checkpoint:
    """Opens a local model folder and checks its files against their headers.

    Raises:
        MissingResourceError: the folder does not exist.
        UsageError: everything else that makes the folder unusable, all faults at once.
    """
    try:
        return _opened(folder, source or str(folder), revision)
    except (OSError, ValueError) as error:  # no permission, a name that is too long or that no file can have
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MissingResourceError(f"{folder} cannot be read: {reason}", hint="check the path") from error


def _opened(folder: Path, source: str, revision: str | None) -> Checkpoint:
    if not folder.exists():
        raise MissingResourceError(f"{folder} does not exist", hint="check the path")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a model folder", hint="pass the folder that holds config.json")
    config = parse_config(folder / CONFIG_FILE)
    listed, shards = _listed_shards(folder)
    tensors, problems = _read_shards(folder, shards)
    holders: dict[str, list[str]] = defaultdict(list)
    for tensor in tensors:
        holders[tensor.name].append(tensor.shard)
    problems += [
        f"tensor {name} is stored more than once: in {', '.join(files)}"
        for name, files in holders.items()
        if len(files) > 1
    ]
    if not problems:
        shard_of = {tensor.name: tensor.shard for tensor in tensors}
        problems = [
            f"{INDEX_FILE} says that {shard} holds tensor {name}; it does not"
            for name, shard in sorted(listed.items())
            if shard_of.get(name) != shard
        ]
    if problems:
        raise UsageError(
            "\n".join(f"{folder}: {problem}" for problem in problems),
            hint=_AGAIN,
        )
    return Checkpoint(
        folder=folder,
        config=of_bare_file(config, (tensor.name for tensor in tensors)),
        tensors={tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.name)},
        shard_bytes={shard: (folder / shard).stat().st_size for shard in shards},
        source=source,
        revision=revision,
    )


def parse_config(path: Path) -> dict[str, Any]:
    """config.json as a dict with a `model_type`.

    Raises:
        UsageError: missing, unreadable, not a JSON object, or without `model_type`.
    """
    if not path.exists():
        raise UsageError(f"{path.parent} has no {path.name}", hint="pass a Hugging Face model folder")
    config = read_json_object(path)
    if not isinstance(config.get("model_type"), str):
        raise UsageError(
            f"{path} has no model_type",
            hint="save the model with transformers' save_pretrained, which writes it",
        )
    return config


def parse_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index: tensor name to shard name.

    Raises:
        UsageError: unreadable, without a usable `weight_map`, or naming a file outside the folder.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UsageError(f"{path} has no weight_map from tensor names to file names", hint=_AGAIN)
    bad = sorted({shard for shard in weight_map.values() if not _is_plain_name(shard)})
    if bad:
        names = ", ".join(map(ascii, bad))
        raise UsageError(f"{path} names files that are no plain *.safetensors names: {names}", hint=_AGAIN)
    return weight_map


def no_weights(place: str, names: Iterable[str]) -> UsageError:
    """The error for a folder or repository whose files, by `names`, hold no usable weights: the reason."""
    plain = sorted(name for name in names if "/" not in name)
    pickled = [name for name in plain if name.endswith(_PICKLE_SUFFIXES)]
    foreign = [name for name in plain if name.endswith(_FOREIGN_SUFFIXES)]
    if "adapter_config.json" in plain:
        return UsageError(
            f"{place} holds an adapter, not a model: no {SINGLE_FILE} and no {INDEX_FILE}",
            hint="merge it into its base model first (peft: merge_and_unload, then save_pretrained)",
        )
    if pickled:
        return UsageError(
            f"{place} holds only pickled weights ({', '.join(pickled)}); they are refused, because "
            "unpickling a file runs the code inside it",
            hint="if you trust the file, convert it once: load it with transformers' from_pretrained and "
            "write it with save_pretrained, which makes safetensors",
        )
    others = f"; it holds {', '.join(foreign)}" if foreign else ""
    return UsageError(
        f"{place} holds no weights: no {SINGLE_FILE} and no {INDEX_FILE}{others}",
        hint="pass a folder written by transformers' save_pretrained",
    )


def _listed_shards(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The index's tensor-to-file map (empty without one) and the files, looked for as transformers does."""
    if (folder / SINGLE_FILE).exists():
        return {}, [SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        listed = parse_index(folder / INDEX_FILE)
        return listed, sorted(set(listed.values()))
    if (folder / GGUF_FILE).exists():
        return {}, [GGUF_FILE]
    raise no_weights(str(folder), (path.name for path in folder.iterdir()))


def _read_shards(folder: Path, shards: Iterable[str]) -> tuple[list[TensorInfo], list[str]]:
    tensors: list[TensorInfo] = []
    problems: list[str] = []
    for shard in shards:
        try:
            tensors.extend((read_gguf_header if shard == GGUF_FILE else read_header)(folder / shard))
        except HeaderError as error:
            problems.append(f"{shard} {error}")
        except FileNotFoundError:
            problems.append(f"{shard} is missing, though {INDEX_FILE} names it")
        except OSError as error:
            problems.append(f"{shard} cannot be read: {error.strerror}")
    return tensors, problems


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UsageError: unreadable, not JSON, or no object."""
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object")
    return value


def _is_plain_name(shard: str) -> bool:
    return shard.endswith(".safetensors") and not {"\\", "\0"} & set(shard) and PurePosixPath(shard).name == shard


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
