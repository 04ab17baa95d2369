"""Time and peak memory of quantizing a model of any size with little memory, beside a plain copy of its files.

    python scripts/bench_size.py FOLDER --memory 1GB --step STEP --out scripts/bench_size.json

FOLDER is a model folder, such as `make_synthetic.py` writes. In one run, on one disk: the weight files are copied and
synced one by one, then `compress plan` predicts, then `compress run` works without evaluation and timing. The peak is
the VmHWM of every process (Linux), asked for 20 times a second. A record is added to the file's list.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.05


def copied(source: Path, target: Path) -> dict[str, float]:
    """Seconds and bytes of a plain copy of the weight files, synced."""
    started, size = time.perf_counter(), 0
    for path in sorted(source.glob("*.safetensors")):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())
        size += path.stat().st_size
        (target / path.name).unlink()
    return {"bytes": size, "seconds": time.perf_counter() - started}


def children(pid: int) -> list[int]:
    """The process and all below it."""
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(one for child in below for one in children(int(child)))]


def memory_of(pid: int) -> tuple[int, int]:
    """Peak and present resident bytes; zeros of a process that has ended."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return tuple(int(lines[key].split()[0]) * 1024 for key in ("VmHWM", "VmRSS"))  # type: ignore[return-value]
    except (OSError, KeyError):
        return 0, 0


def watched(command: list[str]) -> dict[str, Any]:
    """Runs a command: seconds, CPU seconds, the peak of each process and that of all together."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peaks: dict[int, int] = {}
    together = 0
    while process.poll() is None:
        found = {pid: memory_of(pid) for pid in children(process.pid)}
        together = max(together, sum(present for _, present in found.values()))
        for pid, (peak, _) in found.items():
            peaks[pid] = max(peaks.get(pid, 0), peak)
        time.sleep(POLL_SECONDS)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peaks": sorted(peaks.values(), reverse=True),
        "peak_together": together,
    }


def measured(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    recipe = {
        "version": 1,
        "model": str(args.folder.absolute()),
        "output": str(work / "out"),
        "calibration": {"samples": args.samples, "length": args.length},
        "steps": [{"quantize": json.loads(args.step)}],
    }
    file = work / "recipe.yaml"
    file.write_text(json.dumps(recipe | {"evaluate": None}))
    base, memory = [sys.executable, "-m", "compress"], ["--memory", args.memory] if args.memory else []
    copy = copied(args.folder, work)
    planned = subprocess.run([*base, "plan", str(file), *memory, "--json"], capture_output=True, text=True, check=True)
    return {
        "model": args.folder.name,
        "step": json.loads(args.step),
        "memory": args.memory,
        "calibration": [args.samples, args.length],
        "load_before": os.getloadavg()[0],
        "copy": copy,
        "predicted_memory_bytes": json.loads(planned.stdout)["plan"]["estimate"]["memory_bytes"],
        "run": watched([*base, "run", str(file), *memory]),
        "load_after": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", default='{"target": "int4"}')
    parser.add_argument("--memory")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--work", type=Path, default=Path.cwd(), help="where the copy and the result are made")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        record = measured(args, Path(work))
    records = json.loads(args.out.read_text()) if args.out.exists() else []
    args.out.write_text(json.dumps([*records, record], indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
