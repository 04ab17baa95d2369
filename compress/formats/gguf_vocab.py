"""The tokenizer inside a GGUF file, from tokenizer.json: what llama.cpp can express, and why it cannot.

llama.cpp has its own tokenizers. Two of them are written here: `gpt2`, byte-level BPE, whose rule for splitting text
into words goes by a name (`tokenizer.ggml.pre`); and `llama`, SentencePiece's BPE with byte fallback, which joins
the pair whose result has the highest score. The rule is recognized by the expression that tokenizer.json states, so
that a file is never written with a rule that splits otherwise. Source: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import MissingResourceError, UsageError
from compress.model.checkpoint import read_json_object
from compress.model.gguf_header import gguf_package
from compress.model.sidefiles import tokenizer_files

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[tuple[str, bool], str] = {
    (_WORDS_LLAMA3, True): "llama-bpe",
    (_WORDS_LLAMA3, False): "dbrx",
    (_WORDS_QWEN2, False): "qwen2",
    (_WORDS_TEKKEN, True): "tekken",
}
"""(expression of a Split, ignore_merges) -> llama.cpp's name of the rule."""


@dataclass(frozen=True)
class Vocabulary:
    """Attributes:
    model, pre: llama.cpp's names of the tokenizer and of its rule for words.
    tokens, types: one per row of the embedding; `types` are ggml's numbers.
    scores: one per row for `llama`, else None.
    merges: whether the file needs the list of merges.
    space_prefix: whether text gets a space in front.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] | None
    merges: bool
    space_prefix: bool


def read_vocabulary(folder: Path, rows: int, source: str) -> Vocabulary:
    """The tokenizer of a model folder whose embedding has `rows` rows.

    Raises:
        MissingResourceError: there is no tokenizer.
        UsageError: llama.cpp has no counterpart of it; says which part.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        others = tokenizer_files(folder)
        what = f"only {', '.join(others)}" if others else "no tokenizer"
        raise MissingResourceError(
            f"{source} has {what}; a GGUF file carries its tokenizer, which is read from tokenizer.json.",
            hint="Save it with transformers' AutoTokenizer and save_pretrained, or choose another --format.",
        )
    tokenizer = read_json_object(file)
    model = tokenizer.get("model") or {}
    try:
        return _vocabulary(tokenizer, model, rows)
    except _NoCounterpartError as error:
        raise UsageError(
            f"{file}: llama.cpp has no counterpart of this tokenizer: {error}.", hint="Choose another --format."
        ) from None
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{file} is no tokenizer of the form that is known ({type(error).__name__}: {error})."
        ) from error


class _NoCounterpartError(Exception):
    """The part that llama.cpp lacks."""


def _vocabulary(tokenizer: Mapping[str, Any], model: Mapping[str, Any], rows: int) -> Vocabulary:
    if model.get("type") != "BPE":
        raise _NoCounterpartError(f"its model is {model.get('type')}, and only BPE is written")
    steps = list(_flat(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    if any(step.get("type") == "ByteLevel" for step in steps):
        pre = _rule(steps, model)
        _check_normalizer(tokenizer)
        tokens, types = _tokens(tokenizer, model, rows, pieces=False)
        return Vocabulary("gpt2", pre, tokens, types, None, True, False)
    if model.get("byte_fallback"):
        prefix = _space_prefix(tokenizer, steps)
        tokens, types = _tokens(tokenizer, model, rows, pieces=True)
        return Vocabulary("llama", "default", tokens, types, _scores(tokens, model), False, prefix)
    raise _NoCounterpartError("it is BPE neither on bytes nor with byte fallback")


def _flat(part: Mapping[str, Any] | None, members: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part.get("type") == "Sequence":
        for member in part.get(members) or ():
            yield from _flat(member, members)
    else:
        yield part


def _rule(steps: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> str:
    """llama.cpp's name for how byte-level text is cut into words."""
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _NoCounterpartError("a space is put in front of the text, or bytes are not the last step")
    own = bool(last.get("use_regex", True))
    if own and not before and not model.get("ignore_merges"):
        return "gpt-2"
    if own and [(step.get("type"), step.get("individual_digits")) for step in before] == [("Digits", True)]:
        return "smollm"
    if not own and len(before) == 1 and before[0].get("type") == "Split":
        expression = (before[0].get("pattern") or {}).get("Regex")
        name = _SPLITS.get((str(expression), bool(model.get("ignore_merges"))))
        if name is not None and before[0].get("behavior") == "Isolated" and not before[0].get("invert"):
            return name
    raise _NoCounterpartError("its rule for cutting text into words is none of those that are known here")


def _check_normalizer(tokenizer: Mapping[str, Any]) -> None:
    """llama.cpp changes no letters; NFC, which leaves nearly all text as it is, is let pass as its converter does."""
    for step in _flat(tokenizer.get("normalizer"), "normalizers"):
        if step.get("type") != "NFC":
            raise _NoCounterpartError(f"the text is changed first ({step.get('type')})")


def _space_prefix(tokenizer: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether SentencePiece's space is put in front; raises where anything else happens to the text."""
    prefix = False
    for step in _flat(tokenizer.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend" and step.get("prepend") == _SPACE:
            prefix = True
        elif step.get("type") != "Replace" or (step.get("pattern"), step.get("content")) != ({"String": " "}, _SPACE):
            raise _NoCounterpartError(f"the text is changed first ({step.get('type')})")
    for step in steps:
        if step.get("type") == "Metaspace" and step.get("replacement") == _SPACE:
            prefix = prefix or step.get("prepend_scheme", "always") != "never"
        elif step.get("type") != "Split" or step.get("pattern") != {"String": " "}:  # no spaces are left to split at
            raise _NoCounterpartError(f"words are cut by {step.get('type')}")
    return prefix


def _tokens(
    tokenizer: Mapping[str, Any], model: Mapping[str, Any], rows: int, *, pieces: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Tokens and their types by id; rows of the embedding without a token get a name and count as unused."""
    tokens = {int(number): str(token) for token, number in model["vocab"].items()}
    types = dict.fromkeys(tokens, NORMAL)
    if pieces:
        types |= {number: BYTE for number, token in tokens.items() if _BYTE.fullmatch(token)}
    for added in tokenizer.get("added_tokens") or ():
        number, content = int(added["id"]), str(added["content"])
        tokens[number] = content
        if added.get("special"):
            types[number] = CONTROL
        elif not pieces or _SPACE not in content:  # a run of spaces is found by joining, and printed as spaces
            types[number] = USER_DEFINED
    unknown = model.get("unk_token")
    if pieces and unknown is not None:
        types |= {number: UNKNOWN for number, token in tokens.items() if token == unknown}
    if tokens and max(tokens) >= rows:
        raise _NoCounterpartError(f"it has the id {max(tokens)}, and the embedding has {rows} rows")
    names = tuple(tokens.get(number, f"[PAD{number}]") for number in range(rows))
    return names, tuple(types.get(number, UNUSED) for number in range(rows))


def _scores(tokens: Sequence[str], model: Mapping[str, Any]) -> tuple[float, ...]:
    """Minus the rank of the first merge that makes a token: SentencePiece joins by score as BPE does by rank."""
    ranks: dict[str, int] = {}
    for merge in model.get("merges") or ():
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, len(ranks))
    return tuple(-float(ranks[token]) if token in ranks else 0.0 for token in tokens)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the package's warnings about templates of pairs of texts, which no language model is given."""
    log = logging.getLogger("gguf.vocab")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def add_vocabulary(writer: Any, vocabulary: Vocabulary, folder: Path) -> None:
    """The tokenizer's metadata, special tokens and chat template, in a fixed order."""
    gguf = gguf_package()
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_prefix)
    with _quiet():
        special = gguf.SpecialVocab(folder, load_merges=vocabulary.merges, n_vocab=len(vocabulary.tokens))
    if vocabulary.merges and not special.merges:  # llama.cpp wants a list with at least one; this one never applies
        special.merges = [f"{_SPACE} {_SPACE}"]
    special.add_special_token = {"bos": False, "eos": False} | special.add_special_token
    special.add_to_gguf(writer, quiet=True)
