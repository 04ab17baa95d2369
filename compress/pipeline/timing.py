"""Times and peak memory of two models, interleaved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.errors import MissingResourceError
from compress.pipeline.pair import Pair, timed_loader
from compress.records import Measurement

if TYPE_CHECKING:
    from compress.measure.latency.measuring import Timed
    from compress.measure.latency.settings import Variant

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST_MEMORY = 0.8  # share of the free memory that the benchmark's processes may fill together
PROCESS_BYTES = 400e6  # Python and torch in each of them


def time_models(pair: Pair) -> Timed | None:
    """Times and peak memory of original and result; None if no bench is asked for, or what is timed cannot run."""
    bench = pair.asked.bench
    if bench is None or pair.kind == "other" or _why_untimed(pair):
        return None
    import torch

    from compress.measure.latency.measuring import measure_latency
    from compress.measure.latency.settings import Stop, Workload

    _check_memory(pair)
    variants, originals = _variants(pair)
    decodes = pair.kind == "decoder"
    combinations = dict.fromkeys((p, n if decodes else None, b) for p, n, b in bench.combinations)
    return measure_latency(
        variants,
        original_labels=originals,
        workloads=[Workload(pair.kind, prompt, new, batch) for prompt, new, batch in combinations],
        stop=Stop(bench.budget, bench.precision),
        threads=torch.get_num_threads(),
        seed=pair.asked.seed,
        device=pair.device,
        trust_remote_code=pair.trust_remote_code,
        progress=pair.progress,
        levels=pair.levels,
    )


def why_not_timed(error: BaseException) -> str:
    reason = str(error).partition("\n")[0] or "interrupted"
    return f"the benchmark did not finish: {reason}"


def not_timed(pair: Pair, error: BaseException) -> list[Measurement]:
    """The figures that the benchmark owes, each without a value and with the reason."""
    return _owed(pair, why_not_timed(error))


def left_out(pair: Pair) -> list[Measurement]:
    """The same figures where the result is not timed at all."""
    why = None if pair.asked.bench is None else _why_untimed(pair)
    return [] if why is None else _owed(pair, f"not timed: {why}")


def _why_untimed(pair: Pair) -> str | None:
    """Why transformers does not run the result here."""
    if pair.result is None:
        return None
    if pair.result.is_gguf:
        return "llama.cpp runs this file, and only transformers is timed here"
    from compress.formats.bitsandbytes import runs_here
    from compress.formats.bitsandbytes_layout import CPU_ROWS

    if not runs_here(pair.result, pair.device):
        return f"bitsandbytes runs no NF4 layer on this processor whose outputs are no multiple of {CPU_ROWS}"
    return None


def _owed(pair: Pair, note: str) -> list[Measurement]:
    names = ("ttft", "tpot") if pair.kind == "decoder" else ("forward",)
    metrics = [f"latency.{name}" for name in names] + ["memory.peak"]
    return [Measurement(metric, "result", None, note=note) for metric in metrics]


def _variants(pair: Pair) -> tuple[list[Variant], list[str]]:
    """The original in every dtype a user might run, and the result as it loads: all loaded, one at work at a time.

    Where memory is short only float32 is compared.
    """
    from compress.measure.latency.settings import Variant

    dtypes = ["float32", "bfloat16"]
    if pair.cast == "float16":
        dtypes.append("float16")
    if not _fits(pair, dtypes):
        pair.progress.say("Memory is short: latency is compared in float32 alone.")
        dtypes = ["float32"]
    variants = [Variant(f"original {dtype}", pair.original.folder, "stock", dtype) for dtype in dtypes]
    originals = [variant.label for variant in variants]
    if pair.result is not None:
        loader = timed_loader(pair)
        own = [pair.cast] if pair.cast in dtypes else dtypes  # a cast runs in its dtype, a quantized model in each
        variants += [Variant(f"result {dtype}", pair.result.folder, loader, dtype) for dtype in own]
    return variants, originals


def _check_memory(pair: Pair) -> None:
    """Refuses prompts that cannot be: one layer's activations in float32 alone would fill the memory.

    Raises:
        MissingResourceError: with what they need at least.
    """
    import psutil

    bench, width = pair.asked.bench, pair.original.config.get("hidden_size") or pair.original.config.get("n_embd")
    if bench is None or not isinstance(width, int):
        return
    needed = max(bench.batch) * max(bench.prompt) * width * 4 * BYTES_PER_VALUE["float32"]  # four live tensors
    free = psutil.virtual_memory().available
    if needed > free:
        raise MissingResourceError(
            f"a batch of {max(bench.batch)} prompts of {max(bench.prompt)} tokens needs more than "
            f"{needed / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are free.",
            hint="Lower the batch or the prompt of the benchmark.",
        )


def _fits(pair: Pair, dtypes: list[str]) -> bool:
    import psutil

    models = 1 if pair.result is None else 2
    needed = sum(models * (pair.parameters * BYTES_PER_VALUE[dtype] + PROCESS_BYTES) for dtype in dtypes)
    return bool(needed < MOST_MEMORY * psutil.virtual_memory().available)
