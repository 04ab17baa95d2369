"""The published JSON Schema of report.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sample_report import task_report

from compress.report.schema import report_json, report_json_schema

FILE = Path(__file__).parents[2] / "recipes" / "report.schema.json"
SCHEMA = report_json_schema()
UPDATE = "python -m compress schema --report > recipes/report.schema.json"


def test_the_committed_schema_is_current() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == SCHEMA, UPDATE


def unknown(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    """Keys of the value that its schema does not know, and keys the schema asks for that are not there."""
    for option in schema.get("anyOf", ()):
        if value is not None:
            yield from unknown(value, option, place)
    schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(value, dict) and "properties" in schema:
        yield from (f"{place}.{key}" for key in value if key not in schema["properties"])
        yield from (f"{place}.{key}" for key in schema.get("required", ()) if key not in value)
        for key, item in value.items():
            yield from unknown(item, schema["properties"].get(key, {}), f"{place}.{key}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from unknown(item, schema.get("items", {}), f"{place}[{i}]")


def test_a_report_has_the_keys_of_the_schema_and_no_others() -> None:
    data = json.loads(report_json(task_report()))
    assert list(unknown(data, SCHEMA, "report")) == []
    data["tasks"][0]["flips"][0]["extra"] = 1
    del data["verdict"]["headline"]
    assert sorted(unknown(data, SCHEMA, "report")) == ["report.tasks[0].flips[0].extra", "report.verdict.headline"]


def test_unknown_keys_are_refused_everywhere() -> None:
    parts = [SCHEMA, *SCHEMA["$defs"].values()]
    assert all(part["additionalProperties"] is False for part in parts if part["type"] == "object")
    assert SCHEMA["properties"]["schema_version"]["const"] == 2
