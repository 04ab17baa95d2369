"""Everything that a result depends on, as flat JSON, so that every difference of two runs can be named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import MismatchError

_SHOWN_HASH = 12  # characters: enough to tell two hashes apart


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """{dotted path: JSON value} of nested JSON: `steps[0].quantize.target`."""
    if isinstance(value, Mapping) and (value or not path):
        pairs = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        pairs = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: json.loads(json.dumps(value))}
    return {name: found for key, item in pairs for name, found in flat(item, key).items()}


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares the `flat` fingerprint that an interrupted run left in `folder` with that of this one.

    Raises:
        MismatchError: they differ; names every difference.
    """
    keys = [*now, *(key for key in before if key not in now)]
    lines = [
        f"{key}: the interrupted run had {_shown(key, before)}, this one has {_shown(key, now)}"
        for key in keys
        if key not in before or key not in now or before[key] != now[key]
    ]
    if lines:
        raise MismatchError(
            f"{folder}: cannot be resumed, as these would change the result:\n  " + "\n  ".join(lines),
            hint="Run it as the interrupted run was, or leave out --resume to discard its work and start afresh.",
        )


def _shown(key: str, values: Mapping[str, Any]) -> str:
    if key not in values or values[key] is None:
        return "none"
    value = values[key]
    if key.endswith("sha256"):
        return str(value)[:_SHOWN_HASH]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
