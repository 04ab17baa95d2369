"""Whether the measurements of this package find what is there and nothing else: 100 seeded repeats of each claim.

    taskset -c 1 python scripts/bench_measurement.py [--live 10]

simulated   the timing protocol on a synthetic clock: noise that stays for seconds, drift, spikes, others on the CPU
recorded    real blocks (bench_measurement_blocks_*.json) in which both models are the same one, resampled in runs of
            neighbours; a slowdown is put in by a factor. `own_interval` is that of the recording as it is
accuracy    two models that answer the same items, a true drop of 2 points at 5 % flips, as many items as planned
live        the whole measurement in real processes on this machine, a slowdown busy-waited in the forward pass

A false alarm is a 95 % interval of result / original that leaves out 1 where both are the same; a slowdown of 3 % is
found where the whole interval lies above 1. "One after the other" is what most tools do: as many samples of one model,
then as many of the other, and Welch's interval of the log times. Everything runs through the package's functions.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
from bench_measurement_live import live_runs

from compress.measure.latency.figures import Timing, latency_measurements
from compress.measure.latency.raw import Loaded
from compress.measure.latency.schedule import Run, Sample, WarmUp, log_ratios, never, run_protocol
from compress.measure.latency.settings import Variant, Workload
from compress.measure.latency.stopping import enough_at, is_look
from compress.measure.tasks.paired import mcnemar_p, score_drop
from compress.power import items_for_drop
from compress.progress import Silent

HERE, RECORDINGS = Path(__file__).parent, "bench_measurement_blocks_*.json"
REPEATS, SLOWDOWN, PRECISION, PIECE = 100, 0.03, 0.02, 10
LONG_RUN, MORE = 2000, 300
"""More repeats of what costs little (accuracies, recorded blocks), for what 100 would be without luck."""
MOST_ALARMS, LEAST_FOUND, LEAST_DROPS = 9, 84, 73
"""What the issue asks for, of 100."""
FORWARD = Workload("encoder", 128, None, 1)
DROP, FLIPS, ACCURACY = 0.02, 0.05, 0.6


@dataclass(frozen=True)
class Interval:
    """Of result / original, with how many blocks (or pairs of samples) it took."""

    low: float
    high: float
    blocks: int

    @property
    def alarm(self) -> bool:
        return not self.low <= 1 <= self.high

    @property
    def slower(self) -> bool:
        return self.low > 1


class SharedMachine:
    """A synthetic machine with a clock of its own, and two models of which the second takes `ratio` times as long.

    A forward pass takes 50 ms times: noise of each sample (2.7 %, as GitHub's runners were seen to have); a speed that
    stays for seconds (first-order autoregressive, 4 %, time constant 3 s); a drift of 10 % within the budget; and a
    spike of 20 to 100 % in one of 50 samples. Now and then others take the CPU for a second, which is told as waiting.
    """

    def __init__(self, ratio: float, *, noise: float, budget: float, seed: int) -> None:
        self.ratio, self.noise, self.budget = ratio, noise, budget
        self.rng = np.random.default_rng([7, seed])
        self.now, self.last, self.speed = 0.0, 0.0, float(self.rng.normal(0, 0.04))
        self.drift = float(self.rng.choice([-0.1, 0.1]))
        self.others = sorted(self.rng.uniform(0, 2 * budget, size=4))

    def clock(self) -> float:
        return self.now

    def sample(self, variant: int) -> Sample:
        self.now += 0.03  # the untimed waking up
        keep = math.exp(-(self.now - self.last) / 3.0)
        self.speed = keep * self.speed + math.sqrt(1 - keep**2) * float(self.rng.normal(0, 0.04))
        self.last = self.now
        logarithm = self.speed + float(self.rng.normal(0, self.noise)) + self.drift * self.now / self.budget
        spike = float(self.rng.uniform(1.2, 2.0)) if self.rng.random() < 0.02 else 1.0
        work = 0.05 * (self.ratio if variant else 1.0) * math.exp(logarithm) * spike
        waiting = float(self.rng.exponential(work)) if any(0 < self.now - at < 1 for at in self.others) else 0.0
        self.now += work + waiting
        return Sample({"forward": work + waiting}, work, {"wall": work + waiting, "waiting": waiting})


def protocol(ratio: float, seed: int, *, noise: float, budget: float, precision: float | None = None) -> Interval:
    machine = SharedMachine(ratio, noise=noise, budget=budget, seed=seed)
    run = run_protocol(
        2,
        machine.sample,
        floor_of=0,
        budget=budget,
        seed=seed,
        clock=machine.clock,
        progress=Silent(),
        enough=never if precision is None else enough_at(precision, [(1, 0)], ["forward"]),
    )
    return judged(run)


def judged(run: Run) -> Interval:
    """The interval as the report would show it."""
    timing = Timing(
        run=run,
        variants=[Variant("original", Path(), "stock", "float32"), Variant("result", Path(), "stock", "float32")],
        original_labels=["original"],
        workload=FORWARD,
        loads=[Loaded("", 0.0, None)] * 2,
        peaks=[None, None],
        conditions={},
    )
    found = latency_measurements(timing)
    (ratio,) = [m for m in found if m.metric == "latency.forward.ratio" and m.subject == "result/original"]
    assert ratio.interval is not None
    return Interval(ratio.interval.low, ratio.interval.high, len(run.rounds))


def one_after_the_other(original: Sequence[float], result: Sequence[float]) -> Interval:
    """Welch's 95 % interval of the ratio of two samples that are taken for independent."""
    test = scipy.stats.ttest_ind(np.log(result), np.log(original), equal_var=False)
    low, high = test.confidence_interval(0.95)
    return Interval(math.exp(low), math.exp(high), len(original) // 2)


def simulated_apart(ratio: float, seed: int, *, noise: float, budget: float, blocks: int) -> Interval:
    machine = SharedMachine(ratio, noise=noise, budget=budget, seed=seed)
    first, second = ([machine.sample(variant).whole for _ in range(2 * blocks)] for variant in (0, 1))
    return one_after_the_other(first, second)


def counted(one: Callable[[float, int], Interval], *, long_run: int = 0) -> dict[str, Any]:
    """False alarms and slowdowns found, of REPEATS each; and the alarms of `long_run` further repeats."""
    same = [one(1.0, seed) for seed in range(REPEATS)]
    slowed = [one(1.0 + SLOWDOWN, seed) for seed in range(REPEATS, 2 * REPEATS)]
    more = sum(one(1.0, seed).alarm for seed in range(1000, 1000 + long_run))
    return ({f"alarms_of_{long_run}": more} if long_run else {}) | {
        "alarms": sum(interval.alarm for interval in same),
        "found": sum(interval.slower for interval in slowed),
        "median_blocks": float(np.median([interval.blocks for interval in same + slowed])),
        "median_half_width": float(np.median([math.log(i.high / i.low) / 2 for i in same + slowed])),
    }


def simulated() -> dict[str, Any]:
    """Two machines: as noisy as hosted CI runners, and three times as noisy with a longer budget."""
    rows = {}
    for name, noise, budget in (("CI runner", 0.027, 20.0), ("3 x its noise", 0.08, 120.0)):
        whole = counted(partial(protocol, noise=noise, budget=budget))
        rows[f"{name}: interleaved, {budget:g} s"] = whole
        rows[f"{name}: interleaved, stops at 2 %"] = counted(
            partial(protocol, noise=noise, budget=budget, precision=PRECISION)
        )
        rows[f"{name}: one after the other"] = counted(
            partial(simulated_apart, noise=noise, budget=budget, blocks=int(whole["median_blocks"]))
        )
    return rows


Blocks = list[tuple[tuple[int, Sample], ...]]


def recorded_blocks(file: Path) -> tuple[Blocks, dict[str, Any]]:
    """The time per token and what else was recorded of each sample; and where and when."""
    data = json.loads(file.read_text(encoding="utf-8"))
    columns = data["columns"]
    blocks = []
    for block in data.pop("blocks"):
        rows = [dict(zip(columns, sample, strict=True)) for sample in block]
        blocks.append(tuple((row["side"], _sample(row)) for row in rows))
    return blocks, data


def _sample(row: Mapping[str, Any]) -> Sample:
    seconds = {name: None if value is None else value / 1e6 for name, value in row.items() if name != "side"}
    contention = {name: seconds[name] for name in ("wall", "pressure", "steal", "waiting")}
    return Sample({"forward": seconds["tpot"] or 0.0}, seconds["cpu"], contention)


def resampled(blocks: Blocks, ratio: float, seed: int, length: int) -> Blocks:
    """`length` blocks in runs of PIECE neighbours from random places; the result's times are multiplied by `ratio`.

    What lasts for some blocks stays together (moving-block bootstrap, Kuensch, Annals of Statistics 17, 1989). In half
    of the runs the models change places: both were the same one, and what this pair of processes happened to differ by
    would else be found again in every repeat.
    """
    rng = np.random.default_rng([11, seed])
    chosen: Blocks = []
    while len(chosen) < length:
        start, exchanged = int(rng.integers(0, len(blocks) - PIECE + 1)), int(rng.integers(0, 2))
        for block in blocks[start : start + PIECE]:
            sides = [(side ^ exchanged, sample) for side, sample in block]
            chosen.append(tuple((side, _times(sample, ratio if side else 1.0)) for side, sample in sides))
    return chosen[:length]


def _times(sample: Sample, factor: float) -> Sample:
    return Sample({"forward": factor * sample.whole}, sample.cpu_seconds, sample.contention)


def recorded(file: Path) -> dict[str, Any]:
    """With as many blocks as show the slowdown with 95 % power at the spread of this recording."""
    blocks, facts = recorded_blocks(file)
    ratios = log_ratios(blocks, 1, 0, "forward")
    length = blocks_for(float(ratios.std(ddof=1)))

    def run(rounds: Blocks) -> Run:
        return Run((WarmUp((), stable=True),) * 2, 0, tuple(rounds), tuple(rounds), 0.0)

    def whole(ratio: float, seed: int) -> Interval:
        return judged(run(resampled(blocks, ratio, seed, length)))

    def early(ratio: float, seed: int) -> Interval:
        rounds = resampled(blocks, ratio, seed, length)
        enough = enough_at(PRECISION, [(1, 0)], ["forward"])
        end = next((n for n in range(1, length) if is_look(n) and enough(rounds[:n])), length)
        return judged(run(rounds[:end]))

    def apart(ratio: float, seed: int) -> Interval:
        within = min(length, len(blocks))
        start = int(np.random.default_rng([11, seed]).integers(0, len(blocks) - within + 1))
        times = [sample.whole for block in blocks[start : start + within] for _, sample in block]
        return one_after_the_other(times[: 2 * within], [ratio * seconds for seconds in times[2 * within :]])

    own = judged(run(blocks))
    spread = {
        "blocks": len(blocks),
        "spread_of_a_block": float(ratios.std(ddof=1)),
        "own_interval": [own.low, own.high],
    }
    return {
        "recording": facts | spread,
        "rows": {
            f"interleaved, {length} blocks": counted(whole, long_run=MORE),
            "interleaved, stops at 2 %": counted(early, long_run=MORE),
            "one after the other": counted(apart),
        },
    }


def blocks_for(spread: float) -> int:
    """k = ((1.96 + 1.645) s / ln(1 + slowdown))^2, at least 20."""
    return max(20, math.ceil((3.605 * spread / math.log1p(SLOWDOWN)) ** 2))


def accuracy() -> dict[str, Any]:
    """Of REPEATS comparisons: how many find a true drop, and how many see one where there is none, at 5 % one-sided.

    Gates judge the paired interval; the exact McNemar test beside it is a little more cautious than its 5 %.
    """
    items = items_for_drop(DROP, FLIPS)
    tests: dict[str, Callable[[int, int, int], bool]] = {
        "paired interval": lambda _, lost, won: score_drop(lost, won, items).one_sided[0.95][0] > 0,
        "exact McNemar": lambda _, lost, won: mcnemar_p(lost, won) <= 0.05,
        "unpaired z": lambda right, lost, won: unpaired_p(right + lost, right + won, items) <= 0.05,
    }
    rows: dict[str, dict[str, int]] = {name: {} for name in tests}
    for what, drop in (("found", DROP), ("alarms", 0.0)):
        losses, gains = (FLIPS + drop) / 2, (FLIPS - drop) / 2
        right = ACCURACY - losses
        chances = [right, losses, gains, 1 - right - losses - gains]
        cells = np.random.default_rng(13).multinomial(items, chances, size=LONG_RUN).tolist()
        for name, test in tests.items():
            outcomes = [test(*cell[:3]) for cell in cells]
            rows[name] |= {what: sum(outcomes[:REPEATS]), f"{what}_of_{LONG_RUN}": sum(outcomes)}
    return {"items": items, "drop": DROP, "flips": FLIPS, "accuracy": ACCURACY, "rows": rows}


def unpaired_p(original: int, result: int, items: int) -> float:
    """One-sided two-proportion z test: what one gets who forgets that both models answered the same items."""
    pooled = (original + result) / (2 * items)
    error = math.sqrt(2 * pooled * (1 - pooled) / items)
    return float(scipy.stats.norm.sf((original - result) / items / error)) if error else 1.0


def live_counts(live: Mapping[str, Any]) -> dict[str, Any]:
    """How the live runs ended: intervals of wall and of CPU time that leave out 1, on either side."""

    def count(key: str, judge: Callable[[float, float], bool]) -> int:
        return sum(judge(*run[key][1:]) for run in live["found"])

    def outside(low: float, high: float) -> bool:
        return not low <= 1 <= high

    return {
        f"{clock}_{what}": count(f"{label} {clock}", judge)
        for clock in ("tpot", "cpu")
        for what, label, judge in (("alarms", "same", outside), ("found", "slowed", lambda low, _high: low > 1))
    }


def misses(result: Mapping[str, Any]) -> list[str]:
    """What the issue asks for and these figures do not show; the contrasts are not held to it."""
    found = []
    for part, rows in _parts(result).items():
        for name, row in rows.items():
            if "interleaved" in name and row["alarms"] > MOST_ALARMS:
                found.append(f"{part}, {name}: {row['alarms']} false alarms, at most {MOST_ALARMS}")
            if "interleaved" in name and row["found"] < LEAST_FOUND:
                found.append(f"{part}, {name}: {row['found']} slowdowns found, at least {LEAST_FOUND}")
    for name in ("paired interval", "exact McNemar"):
        drops = result["accuracy"]["rows"][name]["found"]
        if drops < LEAST_DROPS:
            found.append(f"accuracy, {name}: {drops} drops found, at least {LEAST_DROPS}")
    return found


def _parts(result: Mapping[str, Any]) -> dict[str, Any]:
    recordings = {f"recorded ({name})": part["rows"] for name, part in result["recorded"].items()}
    return {"simulated": result["simulated"]} | recordings


def table(result: Mapping[str, Any]) -> str:
    lines = ["| what | false alarms | 3 % found | median blocks | half width |", "|---|---|---|---|---|"]
    for part, rows in _parts(result).items():
        for name, row in rows.items():
            figures = f"{row['median_blocks']:.0f} | {100 * row['median_half_width']:.1f} %"
            more = f" ({row[f'alarms_of_{MORE}']} of {MORE} more)" if f"alarms_of_{MORE}" in row else ""
            lines.append(f"| {part}, {name} | {row['alarms']}{more} | {row['found']} | {figures} |")
    drops = result["accuracy"]
    lines += ["", f"| 2-point drop, {drops['items']} items | false alarms | found | found in the long run |"]
    lines.append("|---|---|---|---|")
    for name, row in drops["rows"].items():
        share = 100 * row[f"found_of_{LONG_RUN}"] / LONG_RUN
        lines.append(f"| {name} | {row['alarms']} | {row['found']} | {share:.1f} % |")
    if "live" in result:
        runs, counts = result["live"]["runs"], result["live"]["counts"]
        lines += ["", f"| {runs} live runs | false alarms | 3 % found |", "|---|---|---|"]
        lines += [
            f"| {clock} | {counts[f'{clock}_alarms']} | {counts[f'{clock}_found']} |" for clock in ("tpot", "cpu")
        ]
    return "\n".join([*lines, "", *(f"MISSED: {miss}" for miss in result["misses"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=10, help="live runs, in two sittings; 0 for none")
    parser.add_argument("--budget", type=float, default=16.0, help="seconds of each live run")
    parser.add_argument("--result", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    start = time.perf_counter()
    result: dict[str, Any] = {
        "asked": {"repeats": REPEATS, "alarms": MOST_ALARMS, "found": LEAST_FOUND, "drops": LEAST_DROPS},
        "simulated": simulated(),
        "recorded": {file.stem.rpartition("_")[2]: recorded(file) for file in sorted(HERE.glob(RECORDINGS))},
        "accuracy": accuracy(),
    }
    if arguments.live:
        live = live_runs(arguments.live, sittings=2, budget=arguments.budget, slowdown=SLOWDOWN)
        result["live"] = live | {"counts": live_counts(live)}
    result |= {"misses": misses(result), "seconds": time.perf_counter() - start}
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
