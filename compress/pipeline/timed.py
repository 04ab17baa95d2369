"""The benchmark and the report around it: whatever happens while models are timed, a report is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import CompressError
from compress.pipeline.measured import Measured
from compress.pipeline.pair import Pair
from compress.pipeline.reporting import write_report_folder
from compress.pipeline.timing import time_models
from compress.report.schema import Report

if TYPE_CHECKING:
    from compress.measure.latency.measuring import Timed


def timed_report(
    pair: Pair,
    folder: Path | None,
    report_on: Callable[[Measured], Report],
    with_times: Callable[[Timed | None], Measured],
    without_times: Callable[[BaseException], Measured],
) -> tuple[Report, Path | None]:
    """Times the pair and writes its report into `folder`; with None nothing is written.

    Args:
        report_on: makes the report of what was measured.
        with_times, without_times: everything that was measured, with the times, or with the reason why there are none.

    Returns:
        The report, and report.json if it was written.

    Raises:
        CompressError, KeyboardInterrupt: what ended the benchmark, after the report was written.
    """
    formats = pair.asked.report

    def write(found: Measured) -> tuple[Report, Path | None]:
        report = report_on(found)
        return report, None if folder is None else write_report_folder(folder, report, formats, found)

    if pair.asked.bench is not None:
        write(without_times(CompressError("the run was killed")))  # what is left if the benchmark is killed
    try:
        timed = time_models(pair)
    except (CompressError, KeyboardInterrupt) as error:
        write(without_times(error))
        raise
    return write(with_times(timed))
