"""Task files of lm-eval, written for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny

CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def rows(count: int = 8) -> list[dict[str, Any]]:
    """Questions with four choices of about one length, so that no length decides."""
    return [
        {
            "question": text[: 30 + at],
            "choices": [one[: 12 + 3 * ((at + k) % 4)] for k, one in enumerate(tiny.sentences(4, seed=at + 9))],
            "answer": at % 4,
        }
        for at, text in enumerate(tiny.sentences(count))
    ]


def write(folder: Path, name: str, data: list[dict[str, Any]], **settings: Any) -> Path:
    """`name`.jsonl and a `name`.yaml that reads it; YAML is a superset of JSON."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(source)}},
        "test_split": "test",
    } | settings
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return file
