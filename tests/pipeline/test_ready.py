"""Packages that are missing are named before there is work."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import cast

import pytest

from compress.errors import MissingResourceError
from compress.pipeline.ready import check_packages
from compress.plan.planning import Plan


@pytest.mark.parametrize(
    ("format_name", "package"),
    [("compressed-tensors", "compressed_tensors"), ("bitsandbytes", "bitsandbytes")],
)
def test_a_missing_package_is_said_with_its_pip_line(
    format_name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = cast(Plan, SimpleNamespace(format_name=format_name))
    check_packages(plan)
    monkeypatch.setitem(sys.modules, package, None)  # what makes `import` fail
    with pytest.raises(MissingResourceError, match="cannot be imported") as caught:
        check_packages(plan)
    assert f"pip install {format_name}" in str(caught.value.hint)
