"""Reads a report.json that an earlier run left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compress import __version__
from compress.errors import MissingResourceError, UsageError
from compress.output import REPORT_FOLDER
from compress.report.clean import single_line, visible
from compress.report.rejudge import contradictions
from compress.report.schema import SCHEMA_VERSION, Report

FILE = "report.json"
LISTED = 10
"""Faults of a file that are listed."""
WAY_OUT = "Give a report.json that compress wrote, its folder, or the output folder of a run."


def read_report(path: str | Path) -> Report:
    """The report in a file, in a report folder, or in the output folder of a run.

    Raises:
        MissingResourceError: there is none, or it cannot be read.
        UsageError: the file is truncated, no JSON, no report, a report of another version, or contradicts itself.
    """
    file = report_file(path)
    data = parsed(file)
    check_version(file, data)
    try:
        report = Report.model_validate(data)
    except ValidationError as error:
        raise UsageError(faults(file, error), hint=WAY_OUT) from None
    if wrong := contradictions(report):
        lines = [f"{shown(file)}: the report contradicts itself: {fault}" for fault in wrong[:LISTED]]
        raise UsageError(visible("\n".join(lines)), hint=WAY_OUT)
    return report


def report_file(path: str | Path) -> Path:
    """The file itself, or report.json in the folder or in its report folder. Raises as `read_report` does."""
    path = Path(path)
    try:
        if not path.is_dir():
            return path
        candidates = (path / FILE, path / REPORT_FOLDER / FILE)
        found = next((candidate for candidate in candidates if candidate.is_file()), None)
    except (OSError, ValueError) as error:
        raise UsageError(f"{shown(path)}: not a path that can be read: {error}.", hint=WAY_OUT) from None
    if found is None:
        raise MissingResourceError(
            f"{shown(path)}: there is no report: neither {FILE} nor {REPORT_FOLDER}/{FILE} is in this folder.",
            hint="A run writes it where its recipe has `report: [json]`, which is the default.",
        )
    return found


def parsed(file: Path) -> Any:
    try:
        if file.exists() and not file.is_file():  # a device or a pipe may have no end
            raise UsageError(f"{shown(file)}: is no file.", hint=WAY_OUT)
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise MissingResourceError(
            f"{shown(file)}: the report cannot be read: {error.strerror}.", hint=WAY_OUT
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown(file)}: no report: byte {error.start} is no UTF-8.", hint=WAY_OUT) from None
    except ValueError as error:  # a NUL in the path
        raise UsageError(f"{shown(file)}: not a path that can be read: {error}.", hint=WAY_OUT) from None
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        end = error.pos >= len(text.rstrip())
        what = "the report is truncated" if end else f"no JSON: {error.msg}"
        raise UsageError(f"{shown(file)}:{error.lineno}:{error.colno}: {what}.", hint=WAY_OUT) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{shown(file)}: no report: {single_line(str(error))}.", hint=WAY_OUT) from None


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def check_version(file: Path, data: Any) -> None:
    """Raises UsageError for what is no report at all, and for a report of another schema."""
    if not isinstance(data, dict) or "schema_version" not in data or "verdict" not in data:
        raise UsageError(f"{shown(file)}: JSON, but no report of compress.", hint=WAY_OUT)
    version = data["schema_version"]
    if type(version) is int and version == SCHEMA_VERSION:
        return
    tool = data.get("tool")
    writer = tool.get("version") if isinstance(tool, dict) else None
    by = f", written by compress {visible(str(writer))[:40]}" if writer else ""
    raise UsageError(
        f"{shown(file)}: the report has schema version {visible(repr(version))[:40]}{by}; "
        f"compress {__version__} reads version {SCHEMA_VERSION}.",
        hint="Read it with the compress that wrote it, or run again to have a report of this version.",
    )


def faults(file: Path, error: ValidationError) -> str:
    """One line for each place that is wrong."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{shown(file)}: {place(fault['loc'])}: {fault['msg']}" for fault in found[:LISTED]]
    more = len(found) - len(lines)
    return visible("\n".join([*lines, f"and {more} more"] if more else lines))


def place(keys: tuple[int | str, ...]) -> str:
    """`measurements[3].value`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.lstrip(".") or "the report"


def shown(path: Path) -> str:
    return visible(str(path))
