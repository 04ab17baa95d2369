from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer, sentences, tiny_llama, write_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from compress.data.text import Corpus, read_corpus
from compress.data.windows import SEPARATOR, check_ids, decoder_windows, encoder_windows
from compress.errors import UsageError
from compress.model.load import load_tokenizer


def corpus(texts: list[str], tmp_path: Path) -> Corpus:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return read_corpus(str(path), part="calibration")


def with_template(single: str, *special: str) -> PreTrainedTokenizerFast:
    """A byte tokenizer that puts special tokens around a text, as `single` says."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    pairs = [(token, tokenizer.convert_tokens_to_ids(token)) for token in special]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    return tokenizer


def trained(texts: list[str]) -> PreTrainedTokenizerFast:
    """BPE with merges, whose tokens are words and parts of words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def flat(windows: Any) -> list[int]:
    return [int(token) for window in windows.ids for token in window[windows.special :]]


def whole(tokenizer: PreTrainedTokenizerFast, texts: tuple[str, ...]) -> list[int]:
    ids: list[int] = tokenizer(SEPARATOR.join(texts), add_special_tokens=False)["input_ids"]
    return ids


def test_h09_short_lines_are_packed(tmp_path: Path) -> None:
    texts = [f"line {index:02d}" for index in range(20)]
    text = corpus(texts, tmp_path)
    windows = decoder_windows(text, byte_tokenizer(), length=128, samples=64)
    total = 20 * 7 + 19 * 2
    assert [len(window) for window in windows.ids] == [128]
    facts = windows.facts()
    assert facts["lines_read"] == 20
    assert facts["lines_used"] == 15  # 128 = 14 lines with separators (126) and two letters of the next
    assert facts["tokens_used"] == 128 < total
    assert (facts["samples_asked"], facts["windows"]) == (64, 1)
    assert flat(windows) == whole(byte_tokenizer(), text.texts)[:128]


def test_h09_less_than_one_window_is_used_as_it_is(tmp_path: Path) -> None:
    windows = decoder_windows(corpus(["line one", "line two"], tmp_path), byte_tokenizer(), length=128, samples=4)
    assert [len(window) for window in windows.ids] == [18]
    assert (windows.lines_used, windows.tokens, windows.facts()["windows"]) == (2, 18, 1)


def test_h09_one_very_long_line(tmp_path: Path) -> None:
    text = corpus(["word " * 20_000], tmp_path)
    windows = decoder_windows(text, byte_tokenizer(), length=512)
    assert (len(windows.ids), windows.tokens, windows.lines_used) == (195, 195 * 512, 1)
    assert [len(window) for window in encoder_windows(text, byte_tokenizer(), length=512).ids] == [512]


def test_h09_too_little_text_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gives 1 tokens from 1 lines; at least 2 are needed, and 128 for a full"):
        decoder_windows(corpus(["x"], tmp_path), byte_tokenizer(), length=128)


@pytest.mark.parametrize("length", [2, 7, 64])
@pytest.mark.parametrize("samples", [1, 5, None])
def test_partly_tokenized_text_gives_the_tokens_of_the_whole(tmp_path: Path, length: int, samples: int | None) -> None:
    texts = [*sentences(300), "zürich 東京 " * 30, "x" * 3000, "naïve\n\n\ncafé", "ẞ" * 50]
    tokenizer = trained(texts)
    text = corpus(texts[::-1] + texts, tmp_path)
    windows = decoder_windows(text, tokenizer, length=length, samples=samples)
    ids = whole(tokenizer, text.texts)
    count = len(ids) // length if samples is None else samples
    assert [len(window) for window in windows.ids] == [length] * count
    assert flat(windows) == ids[: count * length]
    assert all(window.dtype == torch.int64 for window in windows.ids)


def test_only_a_part_of_the_text_is_tokenized(tmp_path: Path) -> None:
    calls: list[int] = []

    class Watched(PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: Any) -> Any:
            calls.append(len(text))
            return super().__call__(text, **options)

    tokenizer = Watched(tokenizer_object=byte_tokenizer().backend_tokenizer)
    text = corpus(["word " * 100_000], tmp_path)
    decoder_windows(text, tokenizer, length=64, samples=2)
    assert sum(calls) < 10_000


def test_lines_used_counts_the_texts_reached(tmp_path: Path) -> None:
    text = corpus(["aaaa", "bbbb", "cccc"], tmp_path)  # 4 + 2 + 4 + 2 + 4 tokens
    expected = {2: 1, 4: 1, 5: 1, 6: 1, 7: 2, 12: 2, 13: 3, 16: 3}
    for length, lines in expected.items():
        assert decoder_windows(text, byte_tokenizer(), length=length, samples=1).lines_used == lines


def test_tokens_bound_the_number_of_windows(tmp_path: Path) -> None:
    text = corpus(sentences(64), tmp_path)
    sizes = {(64, 640): [64] * 10, (64, 700): [64] * 10, (64, 63): [63], (64, 64): [64]}
    for (length, tokens), lengths in sizes.items():
        windows = decoder_windows(text, byte_tokenizer(), length=length, tokens=tokens)
        assert [len(window) for window in windows.ids] == lengths
        assert windows.facts()["tokens_asked"] == tokens
    both = decoder_windows(text, byte_tokenizer(), length=64, tokens=640, samples=3)
    assert len(both.ids) == 3


def test_what_the_tokenizer_puts_first_starts_every_window(tmp_path: Path) -> None:
    tokenizer = with_template("<s> <x> $A </s>", "<s>", "<x>", "</s>")
    text = corpus(sentences(8), tmp_path)
    windows = decoder_windows(text, tokenizer, length=32, samples=4)
    prefix = tokenizer.convert_tokens_to_ids(["<s>", "<x>"])
    assert windows.special == 2
    assert all(window[:2].tolist() == prefix and len(window) == 32 for window in windows.ids)
    assert flat(windows) == whole(tokenizer, text.texts)[: 4 * 30]
    with pytest.raises(UsageError, match="leave no room for text beside 2 special tokens"):
        decoder_windows(text, tokenizer, length=3)
    assert decoder_windows(text, byte_tokenizer(), length=32).special == 0


def test_encoder_windows_hold_one_text_each(tmp_path: Path) -> None:
    tokenizer = with_template("[CLS] $A [SEP]", "[CLS]", "[SEP]")
    cls, sep = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]"])
    text = corpus(["short", "a longer text", "third"], tmp_path)
    windows = encoder_windows(text, tokenizer, length=10, samples=2)
    assert windows.special == 1
    assert [len(window) for window in windows.ids] == [7, 10]
    assert windows.ids[0].tolist() == tokenizer("short")["input_ids"]
    assert windows.ids[1].tolist() == tokenizer("a longer text", truncation=True, max_length=10)["input_ids"]
    assert windows.ids[1].tolist()[::9] == [cls, sep]
    assert (windows.lines_used, windows.tokens) == (2, 17)
    assert encoder_windows(text, tokenizer, length=10, tokens=8).lines_used == 2
    assert len(encoder_windows(text, tokenizer, length=10, samples=64).ids) == 3


def test_h10_the_tokenizer_stays_as_it_is(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", eos_token_id=[3, 4])
    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    before = tokenizer.backend_tokenizer.to_str()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    text = corpus(sentences(8), tmp_path)
    assert [len(window) for window in decoder_windows(text, tokenizer, length=50, samples=2).ids] == [50, 50]
    assert [len(window) for window in encoder_windows(text, tokenizer, length=50, samples=2).ids] == [50, 50]
    assert tokenizer.backend_tokenizer.to_str() == before
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (None, None, None)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_ids_must_have_a_row_in_the_embedding(tmp_path: Path) -> None:
    windows = decoder_windows(corpus(sentences(8), tmp_path), byte_tokenizer(), length=32)
    largest = max(flat(windows))
    check_ids(windows, largest + 1, "org/name")
    with pytest.raises(UsageError, match=rf"org/name.* the id {largest} .* has {largest} rows"):
        check_ids(windows, largest, "org/name")


def test_the_hash_tells_windows_apart(tmp_path: Path) -> None:
    text = read_corpus(str(write_text(tmp_path / "text.jsonl")), part="calibration")
    first = decoder_windows(text, byte_tokenizer(), length=16, samples=3)
    again = decoder_windows(text, byte_tokenizer(), length=16, samples=3)
    other = decoder_windows(text, byte_tokenizer(), length=24, samples=2)
    assert first.sha256 == again.sha256 != other.sha256
    assert flat(first) == flat(other)
    raw = b"".join(n.to_bytes(8, "little") for w in first.ids for n in [len(w), *w.tolist()])
    assert first.facts()["sha256"] == hashlib.sha256(raw).hexdigest()
