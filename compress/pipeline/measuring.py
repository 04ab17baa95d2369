"""Original and result side by side: size, fidelity on held-out text, latency and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from compress.model.checkpoint import Checkpoint
from compress.pipeline.job import Job
from compress.records import Measurement

if TYPE_CHECKING:
    from compress.data.windows import Windows
    from compress.measure.latency import Variant

Raw = dict[str, Mapping[str, Any]]
"""Raw values by the name of their file in the report folder."""
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST_MEMORY = 0.8  # share of the free memory that the benchmark's processes may fill together
PROCESS_BYTES = 400e6  # Python and torch in each of them


def _levels(job: Job) -> tuple[float, ...]:
    return tuple(sorted({gate.level for gate in job.recipe.gates if gate.level is not None}))


def sizes(job: Job, result: Checkpoint) -> list[Measurement]:
    """Bytes, parameters and bits per weight of original and result."""
    from compress.measure.size import size_measurements

    plan = job.plan
    return size_measurements(
        job.checkpoint,
        result,
        original_parameters=plan.parameters,
        result_parameters=plan.parameters,
        quantized_bytes=plan.quantized_bytes,
        quantized_parameters=plan.quantized_parameters,
    )


def fidelity(job: Job, result: Checkpoint, windows: Windows | None) -> tuple[list[Measurement], Raw]:
    """The result's answers against the original's on held-out text, float32; nothing without windows.

    Raises:
        BrokenResultError: outputs of a model are not finite.
    """
    if windows is None:
        return [], {}
    import torch

    from compress.model.load import load_original
    from compress.runtime.load import load_reference

    trusted = job.options.trust_remote_code
    original_model = load_original(job.checkpoint, dtype=torch.float32, device=job.device, trust_remote_code=trusted)
    result_model = load_reference(result.folder, dtype=torch.float32, device=job.device, trust_remote_code=trusted)
    conditions = {"dtype": "float32", "device": job.device, "engine": "reference", "text": windows.facts()["source"]}
    settings: dict[str, Any] = {"levels": _levels(job), "seed": job.recipe.seed, "conditions": conditions}
    if job.plan.anatomy.kind == "decoder":
        from compress.measure.fidelity import compare_logits, fidelity_measurements

        tokens = compare_logits(original_model, result_model, windows, job.progress)
        return fidelity_measurements(tokens, **settings), {"fidelity": tokens.raw()}
    from compress.measure.encoder import compare_embeddings, encoder_measurements, read_pooling

    pooling = read_pooling(job.checkpoint.folder)
    texts = compare_embeddings(original_model, result_model, windows, pooling, job.progress)
    return encoder_measurements(texts, **settings), {"embeddings": texts.raw()}


def latency(job: Job, result: Checkpoint) -> tuple[list[Measurement], Raw]:
    """Times and peak memory of original and result, interleaved; nothing if the recipe asks for no bench."""
    bench = job.recipe.bench
    if bench is None:
        return [], {}
    import torch

    from compress.measure.latency import measure_latency

    variants, originals = _variants(job, result)
    measurements, samples = measure_latency(
        variants,
        original_labels=originals,
        kind=job.plan.anatomy.kind,
        prompt=bench.prompt,
        new_tokens=bench.new_tokens,
        batch=bench.batch,
        seconds=bench.seconds,
        threads=torch.get_num_threads(),
        seed=job.recipe.seed,
        device=job.device,
        trust_remote_code=job.options.trust_remote_code,
        progress=job.progress,
        levels=_levels(job),
    )
    return measurements, {"latency": samples.raw()}


def not_timed(job: Job, error: BaseException) -> list[Measurement]:
    """The figures that the benchmark owes, each without a value and with the reason."""
    reason = str(error).partition("\n")[0] or "interrupted"
    names = ("ttft", "tpot") if job.plan.anatomy.kind == "decoder" else ("forward",)
    metrics = [f"latency.{name}" for name in names] + ["memory.peak"]
    return [Measurement(metric, "result", None, note=f"the benchmark did not finish: {reason}") for metric in metrics]


def _variants(job: Job, result: Checkpoint) -> tuple[list[Variant], list[str]]:
    """The original in every dtype a user might run, and the result as it loads: all loaded, one at work at a time.

    Where memory is short only float32 is compared.
    """
    from compress.measure.latency import Variant

    dtypes = ["float32", "bfloat16"]
    if job.plan.cast == "float16":
        dtypes.append("float16")
    if not _fits(job, dtypes):
        job.progress.say("Memory is short: latency is compared in float32 alone.")
        dtypes = ["float32"]
    loader: Literal["stock", "reference"] = "reference" if job.plan.format_name == "gptq" else "stock"
    originals = [Variant(f"original {dtype}", job.checkpoint.folder, "stock", dtype) for dtype in dtypes]
    results = [Variant(f"result {dtype}", result.folder, loader, dtype) for dtype in _result_dtypes(job, dtypes)]
    return [*originals, *results], [variant.label for variant in originals]


def _result_dtypes(job: Job, dtypes: list[str]) -> list[str]:
    """A cast runs in the dtype it was cast to; a quantized model in each."""
    return [job.plan.cast] if job.plan.cast in dtypes else dtypes


def _fits(job: Job, dtypes: list[str]) -> bool:
    import psutil

    needed = sum(2 * (job.plan.parameters * BYTES_PER_VALUE[dtype] + PROCESS_BYTES) for dtype in dtypes)
    return bool(needed < MOST_MEMORY * psutil.virtual_memory().available)
