"""`compress doctor`: what this machine and this Python can write, load and run."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from compress import __version__
from compress.cli.boundary import Done
from compress.cli.terminal import Terminal
from compress.plan.extras import FORMAT_LOADERS, PACKAGES, PackageState, check_packages
from compress.plan.machine import Machine, machine
from compress.report.digits import significant
from compress.scheme import TARGETS


def doctor(terminal: Terminal) -> Done:
    """Looks at the machine and the packages. Always ends with exit code 0: a missing extra is no error."""
    with terminal.phase("checking packages", len(PACKAGES)) as advance:
        states = check_packages(advance=advance)
    here = machine(gpus=True)
    terminal.result(doctor_text(here, states))
    return Done(more={"doctor": doctor_data(here, states)})


def loaders(format_name: str, states: Sequence[PackageState]) -> dict[str, list[str]]:
    """For each loader of a format, the packages that are missing or broken here; none means it works."""
    working = {state.package.name for state in states if state.works}
    return {
        loader: [name for name in needed if name not in working]
        for loader, needed in FORMAT_LOADERS[format_name].items()
    }


def doctor_data(here: Machine, states: Sequence[PackageState]) -> dict[str, Any]:
    """Everything `compress doctor` shows, for `--json`."""
    return {
        "compress": __version__,
        "python": platform.python_version(),
        "machine": asdict(here),
        "packages": [
            {
                "name": state.package.name,
                "version": state.version,
                "works": state.works,
                "broken": state.broken,
                "purpose": state.package.purpose,
                "install": None if state.works else state.package.install,
            }
            for state in states
        ],
        "targets": [
            {"target": target.name, "format": name, "missing_for": loaders(name, states)}
            for target in TARGETS.values()
            for name in target.formats
        ],
    }


def doctor_text(here: Machine, states: Sequence[PackageState]) -> RenderableType:
    return Group(
        Text(f"compress {__version__}, Python {platform.python_version()}, {here.system}"),
        section("Machine", machine_table(here)),
        section("Packages", package_table(states)),
        section("What can be written, and loaded here", target_table(states)),
        *missing_section(states),
    )


def section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))


def machine_table(here: Machine) -> Table:
    gpus = ", ".join(f"{gpu.name} ({gigabytes(gpu.memory_total)})" for gpu in here.gpus or ())
    physical = f"{here.physical_cores} physical, " if here.physical_cores else ""
    return pairs(
        {
            "CPU": f"{here.cpu} ({here.architecture})",
            "cores": f"{here.usable_cores:g} usable ({physical}{here.logical_cores} logical)",
            "instructions": " ".join(here.instruction_sets) or "not known on this system",
            "memory": f"{gigabytes(here.memory_available)} free of {gigabytes(here.memory_total)}",
            "GPU": gpus or "none found (nvidia-smi)",
            "disk": f"{gigabytes(here.disk_free)} free at {here.disk_path}",
        }
    )


def package_table(states: Sequence[PackageState]) -> Table:
    table = plain_table("package", "version", "needed for")
    for state in states:
        version = Text(state.version or "not installed", style="" if state.version else "dim")
        if state.broken:
            version = Text(f"{state.version} BROKEN", style="bold red")
        table.add_row(state.package.name, version, state.package.purpose)
    return table


def target_table(states: Sequence[PackageState]) -> Table:
    table = plain_table("target", "format", "loaded by")
    for target in TARGETS.values():
        for name in target.formats:
            table.add_row(
                target.name, name, "; ".join(map(loader_cell, *zip(*loaders(name, states).items(), strict=True)))
            )
    return table


def loader_cell(loader: str, missing: Sequence[str]) -> str:
    """`transformers` or `vLLM (needs vllm)`."""
    return f"{loader} (needs {', '.join(missing)})" if missing else loader


def missing_section(states: Sequence[PackageState]) -> list[RenderableType]:
    """The pip line for each package that is missing, and the reason for each that is broken."""
    parts: list[RenderableType] = []
    broken = {s.package.name: f"{s.broken}; try: {s.package.install}" for s in states if s.broken}
    missing = {s.package.name: s.package.install for s in states if s.version is None}
    if broken:
        parts.append(section("Installed but broken", pairs(broken)))
    if missing:
        parts.append(section("To add what is missing", pairs(missing)))
    return parts


def pairs(rows: Mapping[str, str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def plain_table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def gigabytes(count: int) -> str:
    return f"{significant(count / 1e9, 3)} GB"
