"""The direction of imports, what starts without torch, and the size of files and functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "compress"
# From the bottom up: a room may import rooms of lower rows and itself, never a neighbour in its own row.
ROWS = [
    {"errors", "records", "scheme", "metrics", "progress", "divergence", "orphans", "durable", "fingerprint", "power"},
    {"recipe", "model", "data", "journal", "output"},
    {"workspace"},
    {"formats"},
    {"quantize", "prune", "runtime"},
    {"verdict", "measure", "plan"},
    {"report", "starter"},
    {"pipeline"},
    {"cli"},
    {"__main__"},
]
BASE = {"errors", "progress", "records", "scheme", "metrics", "durable", "fingerprint"}  # may name each other
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
            if node.module == "compress":
                names = [f"compress.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("compress.")}
    return found - {"__version__"}


def row_of(name: str) -> int:
    return next(index for index, row in enumerate(ROWS) if name in row)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        assert not imports(path)
        return
    for other in imports(path) - {here}:
        if here in BASE and other in BASE:
            continue
        assert row_of(other) < row_of(here), f"{path.name} ({here}) imports {other}"


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            # A signature that is a table of documented options is data; what counts is what happens below it.
            assert node.end_lineno - node.body[0].lineno < LONGEST_FUNCTION, f"{path.name}: {node.name}"


LIGHT = (
    "import compress.cli.app, compress.plan.planning, compress.recipe.source, compress.verdict, compress.report.build"
)


def test_the_command_line_starts_without_torch() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'scipy', 'numpy', 'lm_eval', 'bitsandbytes', 'accelerate'}"
    code = f"import sys; {LIGHT}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
