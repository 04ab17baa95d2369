"""JSON that others wrote: every way in which it can be unusable is a ValueError."""

from __future__ import annotations

import json
import re
from typing import Any

_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes) -> Any:
    """The value of a UTF-8 JSON text.

    Raises:
        ValueError: not UTF-8, not JSON, nested deeper than Python can follow, or with a string that is no text
            (JSON can spell half of a surrogate pair, which no file name and no terminal can hold).
    """
    try:
        value = json.loads(raw.decode("utf-8"))
        if _HALF_PAIR.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value
