"""Peak memory of a run, from shapes alone: what is in memory together at the widest moments of every phase.

    prune           one block twice, or the whole model with gradients (see `pruning_cost.py`)
    quantize        one block, and the statistics and the work of its widest group of layers
    write           one layer, or the two tensors between which the file stands
    prove           the result dense in float32, or one block of it, in two processes that follow each other
    compare, time   whole models

Letters: w width of a layer's input, `out` that of its output; bytes are those of the largest of these moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from compress.plan import pruning_cost
from compress.plan.machine import Machine
from compress.plan.planning import Plan
from compress.plan.pruning import PrunePlan

FLOAT32, FLOAT64, CODE = 4, 8, 1
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NAME_BYTES = 100  # name, dtype, shape and offsets of a window's activations in the file's header
PROGRAM_BYTES = 440e6  # Python, torch and transformers resident before a model is loaded
TEXT_BYTES = 80e6  # and with a tokenizer and the text that it read
PROOF_WINDOWS, PROOF_LENGTH, PROOF_ROWS = 4, 128, 16  # see `pipeline/proving.py` and `formats/proof_worker.py`
LATE_BYTES = 2  # of each number outside the blocks, from the walk before it: 0 to 4 are measured (bench_size.json)
ROUNDED_AT_ONCE = 40 * 2**20  # bytes of what is computed of a million weights
# Matrices [out, w] in float32 that are in memory together, beside the weight and what it is fitted to.
SWEEP_MATRICES = 11  # the polish: scales, codes, errors, gradient, copies in another order, and what the sweep left
AIM_MATRICES = 8  # the correction, half of them float64 and so counted twice
REFINE_BLOCKS = 9  # blocks in float32: latent weights, their gradients and moments


def peak_bytes(plan: Plan, machine: Machine) -> float:
    """Of the process that needs most; the one that works or the one that proves."""
    return max(proof_and_quantize_bytes(plan, machine), measuring_bytes(plan))


def proof_and_quantize_bytes(plan: Plan, machine: Machine) -> float:
    """Peak of everything up to the publication of a proved folder."""
    steps = max(_prune_bytes(plan, machine), _quantize_bytes(plan, machine))
    most = max(steps, _write_bytes(plan), _prove_bytes(plan, machine))
    return _program_bytes(plan) + most


def measuring_bytes(plan: Plan) -> float:
    """Peak of the comparison with the original and of the timing, which need whole models; 0 without either."""
    recipe = plan.recipe
    if recipe.evaluate is None and recipe.bench is None:
        return 0.0
    return max(_evaluate_bytes(plan), plan.original_parameters * FLOAT32 + plan.weight_bytes) + _program_bytes(plan)


def whole_fits(plan: Plan, machine: Machine) -> bool:
    """Whether the result, and the model that is pruned, may be loaded whole, dense in float32."""
    by_block = plan.anatomy.kind in ("decoder", "encoder") and plan.format_name != "gguf"
    full_size = 0.0 if plan.pruned is None else pruning_cost.full_size_bytes(plan.pruned)
    return not by_block or max(_whole_bytes(plan), full_size) + _program_bytes(plan) <= machine.memory_available


def gradients_fit(plan: Plan, machine: Machine) -> bool:
    """Whether the model that is pruned may be loaded whole, with its gradients."""
    pruned = plan.pruned
    return pruned is None or _whole_model_bytes(plan, pruned) + _program_bytes(plan) <= machine.memory_available


def gradients_needed(plan: Plan) -> float:
    """Bytes that the step `prune` needs for the whole model if it cannot do without; 0 otherwise."""
    if plan.pruned is None or not pruning_cost.needs_whole_model(plan.pruned):
        return 0.0
    return _whole_model_bytes(plan, plan.pruned) + _program_bytes(plan)


def _whole_model_bytes(plan: Plan, pruned: PrunePlan) -> float:
    return pruning_cost.whole_model_bytes(pruned, _length(plan))


def stops_fit(plan: Plan, machine: Machine) -> bool:
    """Whether all windows may stop together; otherwise they come a few at a time, in about twice the time."""
    needed = _block_work_bytes(plan, machine) + _state_bytes_kept(plan, machine) + stopped_bytes(plan, machine)
    return needed + _program_bytes(plan) <= machine.memory_available


def states_fit(plan: Plan, machine: Machine) -> bool:
    """Whether the windows may wait in memory in front of each block; otherwise they wait on the disk.

    What a block learns from is in memory at any rate.
    """
    needed = _block_work_bytes(plan, machine) + state_bytes(plan, machine) + _program_bytes(plan)
    return refines(plan) or needed <= machine.memory_available


def state_bytes(plan: Plan, machine: Machine) -> int:
    """Bytes of the activations that enter one block, as they are kept for `--resume`; 0 without calibration.

    Computed on the CPU; a GPU's are the same or half as wide.
    """
    if not plan.calibrates:
        return 0
    calibration, length = plan.recipe.calibration, _length(plan)
    value = VALUE_BYTES[compute_dtype(plan, "cpu", machine)]
    return streams(plan) * calibration.samples * (length * hidden(plan) * value + NAME_BYTES)


def _length(plan: Plan) -> int:
    """Tokens of a calibration window."""
    length, positions = plan.recipe.calibration.length, plan.original.positions
    return min(length, positions or length)


def stopped_bytes(plan: Plan, machine: Machine) -> float:
    """Bytes of all calibration windows that stand in front of the widest group of layers, in the middle of a block."""
    width = max((group.width for group in _groups(plan)), default=0)
    width += 3 * hidden(plan)  # with the residual, the block's input and output
    tokens, value = calibration_tokens(plan), VALUE_BYTES[compute_dtype(plan, "cpu", machine)]
    pruning = 0.0 if plan.pruned is None else pruning_cost.stopped_bytes(plan.pruned, tokens, value)
    return max(pruning, float(streams(plan) * tokens * width * value))


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


def calibration_tokens(plan: Plan) -> int:
    return plan.recipe.calibration.samples * plan.recipe.calibration.length if plan.calibrates else 0


def block_parameters(plan: Plan) -> int:
    """In the linear layers of all blocks."""
    return sum(layer.layer.parameters for layer in plan.layers)


def hidden(plan: Plan) -> int:
    config = plan.checkpoint.config
    return int(config.get("hidden_size") or config.get("n_embd") or 0)


def streams(plan: Plan) -> int:
    """Passes of the windows side by side: through the quantized model, and through the original one if it is asked."""
    step = plan.recipe.quantize
    quantizing = step is not None and plan.algorithm == "gptq" and (step.gptq.asymmetric or bool(step.refine))
    return 2 if quantizing or plan.pruned is not None else 1


def refines(plan: Plan) -> bool:
    """Whether blocks learn after gptq."""
    return plan.recipe.quantize is not None and bool(plan.recipe.quantize.refine)


@dataclass(frozen=True)
class _Group:
    """Layers that share their input: its width, the largest output, all of them, and that of a residual."""

    width: int
    out: int
    outs: int
    residual: int


def _groups(plan: Plan) -> list[_Group]:
    members: dict[str, list[int]] = {}
    widths: dict[str, int] = {}
    for planned in plan.quantized:
        members.setdefault(planned.layer.fused, []).append(planned.layer.out)
        widths[planned.layer.fused] = planned.layer.width
    known = {group for group, _ in plan.anatomy.architecture.residuals}
    return [
        _Group(widths[name], max(outs), sum(outs), outs[0] if name.rpartition(":")[2] in known else 0)
        for name, outs in members.items()
    ]


def _program_bytes(plan: Plan) -> float:
    return PROGRAM_BYTES + (TEXT_BYTES if plan.calibrates else 0.0)


def _prune_bytes(plan: Plan, machine: Machine) -> float:
    """What is done on the whole model, where it fits or must; the reference of the proof. The walk is in the next."""
    if plan.pruned is None:
        return 0.0
    whole = gradients_fit(plan, machine) or gradients_needed(plan) > 0
    full_size = pruning_cost.full_size_bytes(plan.pruned) if whole_fits(plan, machine) else 0.0
    return max(full_size, _whole_model_bytes(plan, plan.pruned) if whole else 0.0)


def _quantize_bytes(plan: Plan, machine: Machine) -> float:
    """The look at every tensor, the work on one block of any step, and the windows in front of it and in it."""
    if not plan.calibrates:
        return max(_largest_tensor(plan), 3 * _largest_layer(plan) * CODE + ROUNDED_AT_ONCE)
    kept = _block_work_bytes(plan, machine) + _state_bytes_kept(plan, machine)
    kept += stopped_bytes(plan, machine) if stops_fit(plan, machine) else 0.0
    return max(_largest_tensor(plan), kept, _outside_bytes(plan, VALUE_BYTES[compute_dtype(plan, "cpu", machine)]))


def _state_bytes_kept(plan: Plan, machine: Machine) -> float:
    return state_bytes(plan, machine) if states_fit(plan, machine) else 0.0


def _block_work_bytes(plan: Plan, machine: Machine) -> float:
    """The block, for each stream once, and its widest group; of the step that needs more."""
    value = VALUE_BYTES[compute_dtype(plan, "cpu", machine)]
    block = block_parameters(plan) / max(plan.anatomy.depth, 1)
    learning = REFINE_BLOCKS * block * FLOAT32 if refines(plan) else 0.0
    groups = max((_group_bytes(plan, one) for one in _groups(plan)), default=0)
    pruning = 0.0 if plan.pruned is None else pruning_cost.walk_bytes(plan.pruned, value)
    return max(pruning, streams(plan) * block * value + learning + groups)


def _group_bytes(plan: Plan, group: _Group) -> float:
    """Statistics and work of one group; the factorization, the correction or the sweep, whichever needs most.

    H is in memory as it is and normalised, and of the drifts, where the original's stream is there, the same two. The
    factorization adds H in the order of the columns and two matrices in float64; what it leaves is one in float32.
    The correction adds its own factor in float64; the polish two damped copies of H, and one between their two orders.
    """
    square, layer = group.width**2, group.out * group.width
    weights = group.outs * group.width * FLOAT32
    if plan.algorithm != "gptq":
        return 3 * square * FLOAT32 + weights + SWEEP_MATRICES * layer * FLOAT32
    two = streams(plan) == 2
    drifts = two * 2 * (square + group.residual * group.width) * FLOAT32
    factor = (3 * FLOAT32 + 2 * FLOAT64) * square + drifts + weights
    correct = two * ((3 * FLOAT32 + FLOAT64) * square + drifts / 2 + weights + AIM_MATRICES * layer * FLOAT32)
    polish = 6 * FLOAT32 * square + 2 * weights + SWEEP_MATRICES * layer * FLOAT32
    return max(factor, correct, polish)


def _write_bytes(plan: Plan) -> float:
    """A tensor beside the one before it, or a layer with its codes, packed and on the way there."""
    quantized = {planned.layer.tensor for planned in plan.quantized}
    kept = (info.nbytes for name, info in plan.checkpoint.tensors.items() if name not in quantized)
    return max(2 * max(kept, default=0), 4 * _largest_layer(plan) * CODE)


def _prove_bytes(plan: Plan, machine: Machine) -> float:
    """Of the larger of two processes, which follow each other: the result dense in float32, or one block of it."""
    return _whole_bytes(plan) if whole_fits(plan, machine) else _block_proof_bytes(plan)


def _whole_bytes(plan: Plan) -> float:
    """The dense result with what it answered, or, in the other process, with its file and what two answers take."""
    answer = PROOF_LENGTH * _vocabulary(plan) * FLOAT32
    answers, compared = (PROOF_WINDOWS + 1) * answer, 2 * answer + PROOF_ROWS * _vocabulary(plan) * 9 * FLOAT64
    return plan.parameters * FLOAT32 + max(answers, plan.weight_bytes + compared)


def _block_proof_bytes(plan: Plan) -> float:
    """A block dense in float32 and what its largest layer is unpacked through; or the embeddings, as they are cast."""
    block = block_parameters(plan) / max(plan.anatomy.depth, 1) * FLOAT32
    return max(block + (CODE + FLOAT32) * _largest_layer(plan), _outside_bytes(plan, FLOAT32 + LATE_BYTES))


def _evaluate_bytes(plan: Plan) -> float:
    fidelity = plan.recipe.evaluate.fidelity if plan.recipe.evaluate else None
    if fidelity is None:
        return 0.0
    return (plan.original_parameters + plan.parameters) * FLOAT32 + 4 * fidelity.length * _vocabulary(plan) * FLOAT32


def _vocabulary(plan: Plan) -> int:
    return int(plan.checkpoint.config.get("vocab_size") or 0)


def _largest_layer(plan: Plan) -> int:
    """Weights in the largest quantized layer."""
    return max((planned.layer.parameters for planned in plan.quantized), default=0)


def _largest_tensor(plan: Plan) -> int:
    """Its bytes in the file."""
    return max((info.nbytes for info in plan.original.tensors.values()), default=0)


def _outside_bytes(plan: Plan, value: int) -> int:
    """What stands in no block of the base model (embeddings, a norm), as it is cast to `value` bytes a number."""
    prefix = plan.anatomy.file_prefix
    blocks = f"{prefix}{plan.anatomy.architecture.blocks}."
    tensors = plan.checkpoint.tensors.items()
    found = [info for name, info in tensors if name.startswith(prefix) and not name.startswith(blocks)]
    cast = {info.name: value * prod(info.shape) for info in found}
    return sum(cast.values()) + sum(info.nbytes for info in found if info.nbytes != cast[info.name])
