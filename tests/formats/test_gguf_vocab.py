"""Tokenizers: which ones llama.cpp can express, what is written of them, and which are refused."""

from __future__ import annotations

import json

import pytest
import tiny

from compress.errors import MissingResourceError, UsageError
from compress.formats.gguf_vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, read_vocabulary

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def split(expression):
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }


@pytest.fixture
def folder(tmp_path):
    tiny.byte_tokenizer(bos_token="Ā").save_pretrained(tmp_path)
    return tmp_path


def changed(folder, change):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    change(tokenizer)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def test_bytes_alone(folder):
    found = read_vocabulary(folder, 260, "m")
    assert (found.model, found.pre, found.merges, found.scores) == ("gpt2", "gpt-2", True, None)
    assert len(found.tokens) == len(found.types) == 260
    assert found.tokens[256:] == ("[PAD256]", "[PAD257]", "[PAD258]", "[PAD259]")
    assert found.types[256:] == (UNUSED,) * 4
    assert found.types[found.tokens.index("Ā")] == CONTROL
    assert found.types[found.tokens.index("a")] == NORMAL


@pytest.mark.parametrize(
    ("pre_tokenizer", "whole_words", "name"),
    [
        (split(LLAMA3), True, "llama-bpe"),
        (split(LLAMA3), False, "dbrx"),
        (split(LLAMA3.replace("{1,3}", "")), False, "qwen2"),
    ],
)
def test_rules_for_words_go_by_llamas_names(pre_tokenizer, whole_words, name, folder):
    def change(tokenizer):
        tokenizer["pre_tokenizer"] = pre_tokenizer
        tokenizer["model"]["ignore_merges"] = whole_words

    assert read_vocabulary(changed(folder, change), 256, "m").pre == name


def test_digits_one_by_one(folder):
    def change(tokenizer):
        digits = {"type": "Digits", "individual_digits": True}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}

    assert read_vocabulary(changed(folder, change), 256, "m").pre == "smollm"


def pieces(tokenizer):
    """SentencePiece's BPE: `▁a` is joined first, then `▁ab`."""
    tokens = ["<unk>", "<s>", "<0x41>", "▁", "a", "b", "▁a", "▁ab", "▁▁", "<box>"]
    tokenizer["model"] |= {
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [["▁", "a"], ["▁a", "b"], ["▁", "▁"]],
        "byte_fallback": True,
        "unk_token": "<unk>",
    }
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [
        {"id": 1, "content": "<s>", "special": True} | rest,
        {"id": 8, "content": "▁▁", "special": False} | rest,
        {"id": 9, "content": "<box>", "special": False} | rest,
    ]
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    tokenizer["pre_tokenizer"] = None


def test_pieces_have_scores_in_the_order_of_their_merges(folder):
    found = read_vocabulary(changed(folder, pieces), 11, "m")
    assert (found.model, found.pre, found.merges, found.space_prefix) == ("llama", "default", False, False)
    assert found.types == (
        *(UNKNOWN, CONTROL, BYTE, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, USER_DEFINED, UNUSED),
    )
    assert found.scores is not None
    assert found.scores[6:9] == (0.0, -1.0, -2.0)


def test_a_space_in_front(folder):
    def change(tokenizer):
        pieces(tokenizer)
        first = {"type": "Prepend", "prepend": "▁"}
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [first, tokenizer["normalizer"]]}

    assert read_vocabulary(changed(folder, change), 11, "m").space_prefix


def unigram(tokenizer):
    tokenizer["model"] = {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0}


def lower(tokenizer):
    tokenizer["normalizer"] = {"type": "Lowercase"}


def prefix(tokenizer):
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True


def other_words(tokenizer):
    tokenizer["pre_tokenizer"] = split(r"\w+|\s+")


def no_bytes(tokenizer):
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}


@pytest.mark.parametrize(
    ("change", "rows", "reason"),
    [
        (unigram, 256, "its model is Unigram"),
        (lower, 256, "Lowercase"),
        (prefix, 256, "a space is put in front"),
        (other_words, 256, "none of those that are known"),
        (no_bytes, 256, "neither on bytes nor with byte fallback"),
        (lambda _: None, 255, "the embedding has 255 rows"),
        (lambda tokenizer: tokenizer["model"].pop("vocab"), 256, "KeyError"),
        (lambda tokenizer: tokenizer.update(pre_tokenizer=[1]), 256, "AttributeError"),
    ],
)
def test_what_llama_cannot_express_is_refused(change, rows, reason, folder):
    with pytest.raises(UsageError, match=reason) as caught:
        read_vocabulary(changed(folder, change), rows, "m")
    assert "tokenizer.json" in caught.value.message


def test_without_a_tokenizer(tmp_path):
    with pytest.raises(MissingResourceError, match="no tokenizer"):
        read_vocabulary(tmp_path, 10, "m")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(MissingResourceError, match=r"only tokenizer\.model"):
        read_vocabulary(tmp_path, 10, "m")
