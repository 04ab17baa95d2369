"""Memory and time of a run, estimated from shapes. Estimates, and called so: no weight is read and nothing is timed.

Time is floating-point work divided by an assumed rate of the machine; memory is the largest of the phases.
"""

from __future__ import annotations

from dataclasses import dataclass

from compress.plan.machine import Machine
from compress.plan.planning import Plan

# Sustained float32 matmul rate per core, GFLOP/s. Assumptions on the low side of what current server cores reach.
GFLOPS_AVX512, GFLOPS_AVX2, GFLOPS_PLAIN = 80.0, 35.0, 8.0
FLOAT32 = 4
PROOF_TOKENS, START_SECONDS, DISK_BYTES_PER_SECOND = 512, 8.0, 200e6
STATE_SLOTS = 2  # the newest activations, and those that a resumed run starts from while these are written
SMOOTHING_FLOPS = 13 * 2 * 1024.0  # per parameter: 12 candidates and none, on about so many tokens
REFINE_WINDOWS = 8  # looked at by each step of refinement
DOCUMENT_TOKENS, CHARACTERS_PER_TOKEN = 130, 4  # of English text
NAME_BYTES = 100  # name, dtype, shape and offsets of a window's activations in the file's header
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROGRAM_BYTES = 500e6  # Python, torch and transformers resident before a model is loaded


@dataclass(frozen=True)
class Estimate:
    """Attributes:
    memory_bytes: peak resident memory of the main process.
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
    seconds = {"quantize": _quantize_flops(plan) / rate, "write and prove": _prove_seconds(plan, rate)}
    recipe = plan.recipe
    if recipe.evaluate is not None:
        seconds["evaluate"] = 2 * _forward_flops(plan, _evaluation_tokens(plan)) / rate
    if recipe.bench is not None:
        seconds["bench"] = recipe.bench.budget + 30.0
    parts = sum(layer.layer.parameters for layer in plan.quantized)
    return Estimate(
        memory_bytes=int(max(proof_and_quantize_bytes(plan, machine), _evaluate_bytes(plan) + PROGRAM_BYTES)),
        disk_bytes=plan.weight_bytes + int(parts * 1.15) + STATE_SLOTS * state_bytes(plan, machine),
        seconds=seconds,
        rate=f"{gflops:g} GFLOP/s per core ({why}), {machine.usable_cores:g} cores",
    )


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


def _prove_bytes(plan: Plan, machine: Machine) -> float:
    """Of the larger of two processes, which follow each other: the result dense in float32, or one block of it."""
    return _whole_bytes(plan) if whole_fits(plan, machine) else _block_proof_bytes(plan)


def _whole_bytes(plan: Plan) -> float:
    """The result dense in float32, beside the packed weights that it is made from."""
    return plan.parameters * FLOAT32 + plan.weight_bytes


def _block_proof_bytes(plan: Plan) -> float:
    """A block dense in float32 and what its largest layer is unpacked through; or what stands outside the blocks."""
    depth = max(plan.anatomy.depth, 1)
    largest = max((layer.layer.parameters for layer in plan.layers), default=0)
    outside = (plan.parameters - _block_parameters(plan)) * FLOAT32
    return max(_block_parameters(plan) / depth * FLOAT32 + 4 * largest * FLOAT32, 1.5 * outside)


def whole_fits(plan: Plan, machine: Machine) -> bool:
    """Whether the result may be loaded whole, dense in float32."""
    by_block = plan.anatomy.kind in ("decoder", "encoder") and plan.format_name != "gguf"
    return not by_block or _whole_bytes(plan) + PROGRAM_BYTES <= machine.memory_available


def measuring_bytes(plan: Plan) -> float:
    """Peak of the comparison with the original and of the timing, which need whole models; 0 without either."""
    recipe = plan.recipe
    if recipe.evaluate is None and recipe.bench is None:
        return 0.0
    return max(_evaluate_bytes(plan), _whole_bytes(plan)) + PROGRAM_BYTES


def proof_and_quantize_bytes(plan: Plan, machine: Machine) -> float:
    """Peak of everything up to the publication of a proved folder."""
    return max(_quantize_bytes(plan, machine), _prove_bytes(plan, machine)) + PROGRAM_BYTES


def _calibration_tokens(plan: Plan) -> int:
    return plan.recipe.calibration.samples * plan.recipe.calibration.length if plan.calibrates else 0


def state_bytes(plan: Plan, machine: Machine) -> int:
    """Bytes of the activations that enter one block, as they are kept for `--resume`; 0 without calibration.

    Computed on the CPU; a GPU's are the same or half as wide.
    """
    if not plan.calibrates:
        return 0
    calibration, positions = plan.recipe.calibration, plan.checkpoint.positions
    length = min(calibration.length, positions or calibration.length)
    value = VALUE_BYTES[compute_dtype(plan, "cpu", machine)]
    return _streams(plan) * calibration.samples * (length * _hidden(plan) * value + NAME_BYTES)


def compute_dtype(plan: Plan, device: str, here: Machine) -> str:
    """The dtype of the forward passes of calibration: the source's where the machine multiplies it fast.

    Without AMX or AVX512-BF16 a CPU takes several times as long for a bfloat16 product as for a float32 one, and no
    CPU is quick with float16. Statistics and solves are float32 and float64 everywhere.
    """
    source = {"BF16": "bfloat16", "F16": "float16"}.get(plan.anatomy.layers[0].dtype, "float32")
    if source == "float32" or device != "cpu":
        return source
    fast = {"amx_bf16", "avx512_bf16"} & set(here.instruction_sets)
    return source if source == "bfloat16" and fast else "float32"


def _hidden(plan: Plan) -> int:
    config = plan.checkpoint.config
    return int(config.get("hidden_size") or config.get("n_embd") or 0)


def _block_parameters(plan: Plan) -> int:
    return sum(layer.layer.parameters for layer in plan.layers)


def _forward_flops(plan: Plan, tokens: int) -> float:
    vocabulary = int(plan.checkpoint.config.get("vocab_size") or 0)
    return 2.0 * tokens * (_block_parameters(plan) + vocabulary * _hidden(plan))


def _hessian_widths(plan: Plan) -> list[int]:
    """One per group of layers that share their input, one block's worth per block."""
    return list({layer.layer.fused: layer.layer.width for layer in plan.quantized}.values())


def _quantize_flops(plan: Plan) -> float:
    """One forward for each stream, statistics, the factorization (about 2 n^3), the sweep and its polish (about 6 out
    n^2) of every layer, and three forwards for each window that a refinement step looks at."""
    tokens = _calibration_tokens(plan)
    if tokens == 0:
        return 200.0 * _block_parameters(plan)
    step = plan.recipe.steps[0].quantize
    parameters, widths = _block_parameters(plan), _hessian_widths(plan)
    forwards = 2.0 * tokens * parameters * (_streams(plan) + bool(step.refine))
    learning = 6.0 * parameters * step.refine * REFINE_WINDOWS * plan.recipe.calibration.length
    smoothing = SMOOTHING_FLOPS * parameters if step.smooths_any else 0.0
    if plan.algorithm != "gptq":
        return forwards + smoothing + 200.0 * parameters
    statistics = tokens * sum(width**2 for width in widths) * (3.0 if _streams(plan) == 2 else 1.0)
    solves = sum(2.0 * layer.layer.width**3 + 12.0 * layer.layer.out * layer.layer.width**2 for layer in plan.quantized)
    return forwards + smoothing + learning + statistics + solves + 450.0 * plan.quantized_parameters


def _streams(plan: Plan) -> int:
    """Passes of the windows side by side: through the quantized model, and through the original one if it is asked."""
    step = plan.recipe.steps[0].quantize
    return 2 if plan.algorithm == "gptq" and (step.gptq.asymmetric or step.refine) else 1


def stopped_bytes(plan: Plan, machine: Machine) -> float:
    """Bytes of all calibration windows that stand in front of the widest group of layers, in the middle of a block."""
    width = max(_hessian_widths(plan), default=0) + 3 * _hidden(plan)  # with the residual, the block's input and output
    value = VALUE_BYTES[compute_dtype(plan, "cpu", machine)]
    return float(_streams(plan) * _calibration_tokens(plan) * width * value)


def stops_fit(plan: Plan, machine: Machine) -> bool:
    """Whether all windows may stop together; otherwise they come a few at a time, in about twice the time."""
    return _quantize_bytes(plan, machine) + stopped_bytes(plan, machine) + PROGRAM_BYTES <= machine.memory_available


def states_fit(plan: Plan, machine: Machine) -> bool:
    """Whether the windows may wait in memory in front of each block; otherwise they wait on the disk.

    What a block learns from is in memory at any rate.
    """
    needed = _block_work_bytes(plan) + state_bytes(plan, machine) + PROGRAM_BYTES
    return bool(plan.recipe.steps[0].quantize.refine) or needed <= machine.memory_available


def _quantize_bytes(plan: Plan, machine: Machine) -> float:
    """The work on one block, and the windows in front of it."""
    return _block_work_bytes(plan) + (state_bytes(plan, machine) if states_fit(plan, machine) else 0.0)


def _block_work_bytes(plan: Plan) -> float:
    depth = max(plan.anatomy.depth, 1)
    block = _block_parameters(plan) / depth * FLOAT32
    outside = (plan.parameters - _block_parameters(plan)) * FLOAT32
    if _calibration_tokens(plan) == 0:
        return outside + 4 * max((layer.layer.parameters for layer in plan.layers), default=0) * FLOAT32
    widths = _hessian_widths(plan)
    hessians = sum(width**2 for width in widths) / depth * FLOAT32
    factor = 6 * max(widths, default=0) ** 2 * 8
    return outside + (3 + 9 * bool(plan.recipe.steps[0].quantize.refine)) * block + 2 * hessians + factor


def _evaluate_bytes(plan: Plan) -> float:
    fidelity = plan.recipe.evaluate.fidelity if plan.recipe.evaluate else None
    if fidelity is None:
        return 0.0
    logits = 4 * fidelity.length * int(plan.checkpoint.config.get("vocab_size") or 0) * FLOAT32
    return 2 * plan.parameters * FLOAT32 + logits
