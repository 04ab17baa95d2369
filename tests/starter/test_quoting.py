"""Text from outside in YAML files: what is read back is what was written, by two readers, and no expression starts."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from compress.errors import UsageError
from compress.recipe.document import read_document
from compress.starter.quoting import github_text, plain_or_quoted, quoted

ODD = [
    "",
    " ",
    "a b",
    "a: b",
    "a #b",
    "'",
    '"',
    "\\",
    "\n",
    "\t",
    "${{ x }}",
    "no",
    "1e3",
    "~",
    "-",
    "*a",
    "&a",
    "é",
    "😀",
]


def read_by_others(text: str) -> object:
    return YAML(typ="safe", pure=True).load(text)


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(ODD))
@example("\x7f\x85\u2028\ufeff\x00\uffff")
def test_what_is_written_is_read(text: str) -> None:
    for write in (quoted, plain_or_quoted):
        line = f"key: {write(text)}  # a comment"
        assert "\n" not in line
        assert read_document(line).value == {"key": text}
        assert read_by_others(line) == {"key": text}


@given(st.text(st.sampled_from("${} '\"\\\nab")))
def test_github_sees_no_expression_but_ours(text: str) -> None:
    value = str(read_by_others(github_text(text)))
    # An expression of GitHub ends at the first `}}` outside of its quotes; ours is a constant.
    assert re.sub(re.escape("${{ '${{' }}"), "${{", value) == text
    assert "${{" not in value.replace("${{ '${{' }}", "")


def test_plain_names_stay_plain() -> None:
    for text in ("./models/smollm2-135m", "org/name@0123abc", "out/x-int4"):
        assert plain_or_quoted(text) == text
    for text in ("yes", "null", ".inf", "true", "on"):
        assert plain_or_quoted(text) == f'"{text}"'


def test_half_a_character_is_refused() -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        quoted("a\udcffb")
