"""The journal of a run: fresh, or that of the interrupted run that this one goes on with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress import __version__
from compress.journal import Journal, counted
from compress.output import Workspace
from compress.pipeline.job import Job
from compress.plan.extras import version_of

if TYPE_CHECKING:
    from compress.data.windows import Windows

_AFTERWARDS: dict[str, Any] = dict.fromkeys(("output", "report", "gates", "evaluate", "bench"), True)
_LATER = {"max_fallback", "max_shard_size"}
"""What a recipe and its step say about the time after the last block; it may change before `--resume`."""


def open_journal(job: Job, workspace: Workspace, windows: Windows | None) -> Journal:
    """The journal in the run's partial. Whether it holds finished parts was settled when the workspace was opened.

    Raises:
        MismatchError: with `--resume`: the interrupted run would have had another result.
    """
    return _opened(job, workspace.partial, fingerprint(job, windows))


def open_pruning_journal(job: Job, workspace: Workspace, windows: Windows | None) -> Journal:
    """As `open_journal`, of the step `prune`."""
    workspace.pruning.mkdir(exist_ok=True)
    return _opened(job, workspace.pruning, pruning_fingerprint(job, windows))


def _opened(job: Job, folder: Path, depends_on: Mapping[str, Any]) -> Journal:
    if not job.options.resume:
        return Journal.start(folder, depends_on)
    journal = Journal.reopen(folder, depends_on)
    if journal.lost:
        job.progress.say(f"{counted(journal.lost)} are damaged or lack their state: they are computed again.")
    if journal.parts:
        job.progress.say(f"Resuming after {counted(journal.parts)}.")
    return journal


def fingerprint(job: Job, windows: Windows | None) -> dict[str, Any]:
    """Everything that the quantized weights depend on, under names that a user can act on."""
    left_out = _AFTERWARDS | {"calibration": {"batch_size"}, "steps": {"__all__": {"quantize": _LATER}}}
    recipe = job.recipe.model_dump(mode="json", exclude=left_out)
    return recipe | {"model.sha256": job.checkpoint.content_hash} | _circumstances(job, windows)


def pruning_fingerprint(job: Job, windows: Windows | None) -> dict[str, Any]:
    """Everything that the pruned weights depend on. How they are quantized later may change before `--resume`."""
    planned = job.plan.pruned
    assert planned is not None
    left_out = _AFTERWARDS | {"calibration": {"batch_size"}, "steps": True}
    depends_on = job.recipe.model_dump(mode="json", exclude=left_out) | {
        "prune": planned.step.model_dump(mode="json", include={"importance", "compensate"}),
        "prune.shapes": [asdict(shape) for shape in planned.candidates],
        "prune.gradients": job.gradients,
        "model.sha256": planned.source.content_hash,
    }
    return depends_on | _circumstances(job, windows)


def _circumstances(job: Job, windows: Windows | None) -> dict[str, Any]:
    """What no recipe says: text, versions, and the machine's arithmetic."""
    import torch

    return {
        "calibration.windows.sha256": None if windows is None else windows.sha256,
        "versions": {"compress": __version__, "python": platform.python_version()}
        | {name: version_of(name) for name in ("torch", "transformers", "numpy", "scipy")},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if job.device == "cuda" else job.device,
        "compute_dtype": job.compute_dtype,
        "cpu": {"instruction_sets": list(job.instruction_sets), "kernels": torch.backends.cpu.get_cpu_capability()},
    }
