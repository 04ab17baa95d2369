"""Token windows for calibration and evaluation: full windows of real tokens, never padding.

The pad, bos and eos ids of the model are never looked at: they may be absent, one number or a list. What a tokenizer
puts around a text is found by asking it.
"""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from compress.data.text import Corpus
from compress.errors import UsageError

SEPARATOR = "\n\n"
_CHARACTERS_PER_TOKEN = 6
_MARGIN = 256
"""Tokens after the last one used that must be there before a cut-off text counts as tokenized: where a text is cut
inside a word, only the tokens near the cut differ from those of the whole text."""


@dataclass(frozen=True)
class Windows:
    """Windows of tokens from one corpus.

    Attributes:
        ids: int64 [length_i] each; all of `length` tokens, save where the text has less than one window.
        special: tokens at the start of each window that the tokenizer puts before any text (BOS, [CLS]).
        length: tokens that were asked for per window, special ones included.
        tokens: tokens in all windows, special ones included.
        lines_used: lines of the corpus that the windows reach into.
        samples_asked, tokens_asked: the wish, None where there was none; the text may have given less.
        text_sha256: of the corpus.
    """

    source: str
    ids: tuple[torch.Tensor, ...]
    special: int
    length: int
    tokens: int
    lines_read: int
    lines_used: int
    samples_asked: int | None
    tokens_asked: int | None
    text_sha256: str

    @property
    def sha256(self) -> str:
        """Over each window's length and ids, as little-endian 64-bit integers."""
        digest = hashlib.sha256()
        for window in self.ids:
            digest.update(len(window).to_bytes(8, "little"))
            digest.update(window.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """What a report says about the data: what was asked for and what was there."""
        return {
            "source": self.source,
            "lines_read": self.lines_read,
            "lines_used": self.lines_used,
            "tokens_used": self.tokens,
            "windows": len(self.ids),
            "length": self.length,
            "samples_asked": self.samples_asked,
            "tokens_asked": self.tokens_asked,
            "text_sha256": self.text_sha256,
            "sha256": self.sha256,
        }


def decoder_windows(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    samples: int | None = None,
    tokens: int | None = None,
) -> Windows:
    """Joins the texts with blank lines and cuts the tokens into windows of exactly `length`.

    What is left over at the end is dropped, unless it is all there is: then there is one shorter window. Each window
    starts with what the tokenizer puts before a text, if anything.

    Args:
        length: tokens per window; at most what the model has positions for.
        samples: windows wanted; None takes as many as there are.
        tokens: tokens wanted in all windows together; with less than `length`, one window of that many.

    Raises:
        UsageError: the text gives fewer than 2 tokens, or `length` leaves no room for 2 tokens of text.
    """
    # Calling a tokenizer switches off the truncation and padding in its file; the caller's must stay as it is.
    tokenizer = copy.deepcopy(tokenizer)
    prefix, _ = _surroundings(tokenizer)
    window = length if tokens is None else min(length, tokens)
    room = _room(window, len(prefix))
    count = _fewest(samples, None if tokens is None else max(1, tokens // window))
    joined = SEPARATOR.join(corpus.texts)
    body, ends = _leading_tokens(tokenizer, joined, None if count is None else count * room)
    if len(body) < 2:
        raise UsageError(
            f"{corpus.source} gives {len(body)} tokens from {len(corpus.texts)} lines; at least 2 are needed, and "
            f"{window} for a full window",
            hint="name a source with more text",
        )
    used = len(body) // room * room or len(body)
    bodies = [body[start : start + room] for start in range(0, used, room)]
    return _windows(
        corpus, [prefix + body for body in bodies], prefix, length, samples, tokens, _lines(corpus, ends[used - 1])
    )


def encoder_windows(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    samples: int | None = None,
    tokens: int | None = None,
) -> Windows:
    """One window per text with the tokenizer's special tokens, cut to `length` tokens in all.

    Args:
        samples: texts wanted; None takes all.
        tokens: stops after the text that brings the tokens of all windows together to this number.

    Raises:
        UsageError: no text gives a token, or `length` leaves no room for 2 tokens of text.
    """
    tokenizer = copy.deepcopy(tokenizer)  # as in decoder_windows
    prefix, suffix = _surroundings(tokenizer)
    room = _room(length, len(prefix) + len(suffix))
    windows: list[list[int]] = []
    used = total = 0
    for text in corpus.texts:
        used += 1
        if body := _encode(tokenizer, text)[:room]:
            windows.append(prefix + body + suffix)
            total += len(windows[-1])
        if len(windows) == samples or (tokens is not None and total >= tokens):
            break
    if not windows:
        raise UsageError(
            f"{corpus.source} gives 0 tokens from {len(corpus.texts)} lines; at least 1 is needed",
            hint="name a source with more text",
        )
    return _windows(corpus, windows, prefix, length, samples, tokens, used)


def check_ids(windows: Windows, rows: int, source: str) -> None:
    """Raises UsageError if a window holds an id that the input embedding of the model `source` has no row for.

    Args:
        rows: rows of the input embedding; valid ids are 0 to rows - 1.
    """
    largest = max(int(window.max()) for window in windows.ids)
    if largest >= rows:
        raise UsageError(
            f"{source}: its tokenizer gives the id {largest} for text of {windows.source}, but the input embedding "
            f"has {rows} rows (ids 0 to {rows - 1})",
            hint="the tokenizer's files and the weights do not belong together; take both from the same model",
        )


def _windows(
    corpus: Corpus,
    ids: Sequence[list[int]],
    prefix: Sequence[int],
    length: int,
    samples: int | None,
    tokens: int | None,
    lines_used: int,
) -> Windows:
    return Windows(
        source=corpus.source,
        ids=tuple(torch.tensor(window, dtype=torch.int64) for window in ids),
        special=len(prefix),
        length=length,
        tokens=sum(map(len, ids)),
        lines_read=corpus.lines_read,
        lines_used=lines_used,
        samples_asked=samples,
        tokens_asked=tokens,
        text_sha256=corpus.sha256,
    )


def _surroundings(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text by default."""
    body = _encode(tokenizer, "a")
    whole: list[int] = tokenizer("a", verbose=False)["input_ids"]
    for start in range(len(whole) - len(body) + 1):
        if whole[start : start + len(body)] == body:
            return whole[:start], whole[start + len(body) :]
    raise UsageError(f"the tokenizer gives {whole} for 'a' with special tokens and {body} without; {body} is not in it")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _leading_tokens(tokenizer: PreTrainedTokenizerBase, text: str, wanted: int | None) -> tuple[list[int], list[int]]:
    """The first `wanted` tokens of `text` (all for None, or where it has no more) and where each of them ends.

    Only a leading part of the text is tokenized, doubled until it gives enough tokens and the margin.
    """
    for size in _growing(len(text), wanted):
        encoding = tokenizer(text[:size], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = encoding["input_ids"]
        if wanted is not None and len(ids) >= wanted + _MARGIN:
            break
    return ids[:wanted], [end for _, end in encoding["offset_mapping"][:wanted]]


def _growing(size: int, wanted: int | None) -> Iterator[int]:
    part = size if wanted is None else _CHARACTERS_PER_TOKEN * (wanted + _MARGIN)
    while part < size:
        yield part
        part *= 2
    yield size


def _lines(corpus: Corpus, end: int) -> int:
    """How many texts the first `end` characters of the joined text reach into."""
    starts = accumulate((len(text) + len(SEPARATOR) for text in corpus.texts[:-1]), initial=0)
    return bisect_left(list(starts), end)


def _room(length: int, special: int) -> int:
    if length < special + 2:
        raise UsageError(
            f"windows of {length} tokens leave no room for text beside {special} special tokens",
            hint=f"ask for a length of at least {special + 2}",
        )
    return length - special


def _fewest(*counts: int | None) -> int | None:
    given = [count for count in counts if count is not None]
    return min(given) if given else None
