from __future__ import annotations

import json
import unicodedata
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report.clean import UNSEEN, cleaned, defused, defused_json, defused_markup, visible

ANY_TEXT = st.text(st.characters(codec=None))


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain, é, 模型, \N{FIRE}", "plain, é, 模型, \N{FIRE}"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\0\r\x7f\x85", "\\x00\\x0d\\x7f\\x85"),
        ("\ud800", "\\ud800"),
        ("\u200b\u202e\u2028\ufeff", "\\u200b\\u202e\\u2028\\ufeff"),
        ("\U000e0041\ufffe", "\\U000e0041\\ufffe"),
    ],
)
def test_what_shows_nothing_becomes_an_escape(text: str, seen: str) -> None:
    assert visible(text) == seen


@given(ANY_TEXT)
def test_nothing_unseen_is_left_and_a_second_pass_changes_nothing(text: str) -> None:
    seen = visible(text)
    assert not any(unicodedata.category(char) in UNSEEN for char in seen if char not in "\n\t")
    assert visible(seen) == seen
    assert seen.encode().decode() == seen


def test_nested_data_is_cleaned_with_its_keys() -> None:
    value = {"a\0": ["\x1b", ("\r", 1, None)], "b": 2.5}
    assert cleaned(value) == {"a\\x00": ["\\x1b", ("\\x0d", 1, None)], "b": 2.5}


@pytest.mark.parametrize("start", ["::error::x", "  ::error::x", "\x1b[1m::error::x", "a\n\t::error::x", "##[error]x"])
def test_commands_are_taken_apart(start: str) -> None:
    for defuse in (defused, defused_markup):
        lines = defuse(start).splitlines()
        assert not any(line.removeprefix("\x1b[1m").strip().startswith("::") for line in lines)
        assert "##[" not in defuse(start)


def test_what_is_no_command_stays() -> None:
    text = "torch::nn, a :: b, ## Heading, # [x]"
    assert defused(text) == defused_markup(text) == defused_json(text) == text


@given(ANY_TEXT)
def test_json_and_markup_mean_the_same_as_before(text: str) -> None:
    hostile = f"##[{text}##vso["
    assert json.loads(defused_json(json.dumps(hostile))) == hostile
    assert "##[" not in defused_json(json.dumps(hostile))
    assert unescape(defused_markup("::a\n##[b")) == "::a\n##[b"
