"""Memory and time of a run, estimated from shapes. Estimates, and called so: no weight is read and nothing is timed.

Time is floating-point work divided by an assumed rate of the machine; memory is in `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from compress.plan import pruning_cost
from compress.plan.machine import Machine
from compress.plan.memory import block_parameters, calibration_tokens, hidden, peak_bytes, state_bytes, streams
from compress.plan.planning import Plan

# Sustained float32 matmul rate per core, GFLOP/s. Assumptions on the low side of what current server cores reach.
GFLOPS_AVX512, GFLOPS_AVX2, GFLOPS_PLAIN = 80.0, 35.0, 8.0
PROOF_TOKENS, START_SECONDS, DISK_BYTES_PER_SECOND = 512, 8.0, 200e6
STATE_SLOTS = 2  # the newest activations, and those that a resumed run starts from while these are written
SMOOTHING_FLOPS = 13 * 2 * 1024.0  # per parameter: 12 candidates and none, on about so many tokens
REFINE_WINDOWS = 8  # looked at by each step of refinement
DOCUMENT_TOKENS, CHARACTERS_PER_TOKEN = 130, 4  # of English text


@dataclass(frozen=True)
class Estimate:
    """Attributes:
    memory_bytes: peak resident memory of the larger of two processes, the one that works and the one that proves.
    disk_bytes: free space the run needs: parts, activations for `--resume`, and the staged result.
    seconds: {phase: seconds}.
    rate: the assumption behind the seconds, in words.
    """

    memory_bytes: int
    disk_bytes: int
    seconds: dict[str, float]
    rate: str


def estimate(plan: Plan, machine: Machine) -> Estimate:
    gflops, why = _rate(machine)
    rate = gflops * 1e9 * machine.usable_cores
    seconds: dict[str, float] = {}
    if plan.pruned is not None:
        seconds["prune"] = pruning_cost.flops(plan.pruned, _pruning_tokens(plan)) / rate + _prove_seconds(plan, rate)
    if plan.quantizes:
        seconds |= {"quantize": _quantize_flops(plan) / rate, "write and prove": _prove_seconds(plan, rate)}
    recipe = plan.recipe
    if recipe.evaluate is not None:
        seconds["evaluate"] = 2 * _forward_flops(plan, _evaluation_tokens(plan)) / rate
    if recipe.bench is not None:
        seconds["bench"] = recipe.bench.budget + 30.0
    states = state_bytes(plan, machine)
    parts = sum(layer.layer.parameters for layer in plan.quantized)
    return Estimate(
        memory_bytes=int(peak_bytes(plan, machine)),
        disk_bytes=plan.weight_bytes + int(parts * 1.15) + STATE_SLOTS * states + _pruning_disk(plan, states),
        seconds=seconds,
        rate=f"{gflops:g} GFLOP/s per core ({why}), {machine.usable_cores:g} cores",
    )


def _pruning_tokens(plan: Plan) -> int:
    return calibration_tokens(plan) if plan.pruned is not None and plan.pruned.calibrates else 0


def _pruning_disk(plan: Plan, states: int) -> int:
    """The step's parts; where another step follows also the folder that it starts from, and the last activations."""
    if plan.pruned is None:
        return 0
    folder = sum(shard.nbytes for shard in plan.pruned.shards)
    return pruning_cost.parts_bytes(plan.pruned) + (folder + states if plan.quantizes else 0)


def _rate(machine: Machine) -> tuple[float, str]:
    if "avx512f" in machine.instruction_sets:
        return GFLOPS_AVX512, "assumed for AVX-512"
    if "avx2" in machine.instruction_sets:
        return GFLOPS_AVX2, "assumed for AVX2"
    return GFLOPS_PLAIN, "assumed without AVX2"


def _evaluation_tokens(plan: Plan) -> int:
    """Tokens that each model reads; tasks of lm-eval, whose items are not known yet, are left out."""
    evaluate = plan.recipe.evaluate
    if evaluate is None:
        return 0
    tokens = evaluate.fidelity.tokens if evaluate.fidelity is not None else 0
    if plan.anatomy.kind == "decoder" and evaluate.generation is not None:
        tokens += evaluate.generation.prompts * (evaluate.generation.prompt + evaluate.generation.new_tokens)
    if plan.anatomy.kind == "encoder" and evaluate.retrieval is not None:
        tokens += evaluate.retrieval.documents * DOCUMENT_TOKENS
    for planned in plan.tasks:
        for item in planned.items.items if planned.items is not None else ():
            choices = item.choices or ("",)
            tokens += sum(len(item.question) + len(choice) for choice in choices) // CHARACTERS_PER_TOKEN
    return tokens


def _prove_seconds(plan: Plan, rate: float) -> float:
    """Two starts of Python, the bytes read and written a few times, and the proof's few windows in two processes."""
    tokens = 2 * (PROOF_TOKENS + 2 * 16 * 24)  # greedy decoding without cache repeats its prompt
    return 2 * START_SECONDS + 6 * plan.parameters * 2 / DISK_BYTES_PER_SECOND + _forward_flops(plan, tokens) / rate


def _forward_flops(plan: Plan, tokens: int) -> float:
    vocabulary = int(plan.checkpoint.config.get("vocab_size") or 0)
    return 2.0 * tokens * (block_parameters(plan) + vocabulary * hidden(plan))


def _hessian_widths(plan: Plan) -> list[int]:
    """One per group of layers that share their input, one block's worth per block."""
    return list({layer.layer.fused: layer.layer.width for layer in plan.quantized}.values())


def _quantize_flops(plan: Plan) -> float:
    """One forward for each stream, statistics, the factorization (about 2 n^3), the sweep and its polish (about 6 out
    n^2) of every layer, and three forwards for each window that a refinement step looks at."""
    tokens = calibration_tokens(plan) if plan.fits_codes else 0
    if tokens == 0:
        return 200.0 * block_parameters(plan)
    step = plan.recipe.quantize
    if step is None:
        return 0.0
    parameters, widths = block_parameters(plan), _hessian_widths(plan)
    forwards = 2.0 * tokens * parameters * (streams(plan) + bool(step.refine))
    learning = 6.0 * parameters * step.refine * REFINE_WINDOWS * plan.recipe.calibration.length
    smoothing = SMOOTHING_FLOPS * parameters if step.smooths_any else 0.0
    if plan.algorithm != "gptq":
        return forwards + smoothing + 200.0 * parameters
    statistics = tokens * sum(width**2 for width in widths) * (3.0 if streams(plan) == 2 else 1.0)
    solves = sum(2.0 * layer.layer.width**3 + 12.0 * layer.layer.out * layer.layer.width**2 for layer in plan.quantized)
    return forwards + smoothing + learning + statistics + solves + 450.0 * plan.quantized_parameters
