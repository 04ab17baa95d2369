"""Runs the command line in a process of its own, as a user would."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def compress(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`compress ARGUMENTS`, offline, with the environment given."""
    return subprocess.run(
        [sys.executable, "-m", "compress", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        env=base_environment() | environment,
        check=False,
        timeout=600,
    )


def base_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "120"}


def hashes(folder: Path, *, without: str = "report/") -> dict[str, str]:
    """{relative name: SHA-256} of every file, the report left out."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.relative_to(folder).as_posix().startswith(without)
    }
