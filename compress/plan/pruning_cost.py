"""Memory and arithmetic of the step `prune`, from shapes alone.

    whole model     gradients, the search over shapes and the order of the layers: all weights in float32, with what a
                    backward pass keeps of one window or the moments of all projections
    walk            one block twice, statistics and solves of its widest projection, and the windows of both models
    proof           the original in full size, in float32, with a few answers

Letters: w width of a projection's input, `out` that of its output, T tokens of one window.
"""

from __future__ import annotations

from math import prod

from compress.model.anatomy import LinearLayer
from compress.model.checkpoint import Checkpoint
from compress.model.prunable import output_of
from compress.plan.pruning import PrunePlan
from compress.prune.settings import COMPARED_TOKENS, FISHER_TOKENS, MOMENT_TOKENS, RETRIED, TAYLOR_TOKENS

FLOAT32, FLOAT64 = 4, 8
STREAMS = 2  # the original and the pruned model, side by side
SQUARES, LAYERS = 14, 30  # matrices [w, w] and [out, w] in float64 of the widest projection that are there together
MOMENT_SQUARES = 6  # matrices [w, w] in float64 where a search chooses units
STATES_PER_BLOCK = 16  # [T, hidden] that a backward pass keeps of a block, beside four [T, FFN width]
LOGITS = 5  # [T, V] at the worst moment of a backward pass


def needs_whole_model(pruned: PrunePlan) -> bool:
    """Whether the step cannot do without the whole model in memory."""
    step = pruned.step
    ordered = pruned.after.layers < pruned.before.layers and step.importance in ("obs", "taylor")
    return step.searches or step.importance == "taylor" or ordered


def takes_gradients(pruned: PrunePlan) -> bool:
    """Whether the step uses gradients where memory holds them."""
    return pruned.calibrates and pruned.step.importance in ("obs", "taylor")


def whole_model_bytes(pruned: PrunePlan, length: int) -> float:
    """Peak of what is done on the whole model, with windows of `length` tokens; 0 where nothing is."""
    found = [0.0]
    weights, outputs = FLOAT32 * _numbers(pruned.source), _outputs(pruned)
    rows = _vocabulary(pruned.source) if pruned.anatomy.kind == "decoder" else 0
    if takes_gradients(pruned):
        states = length * (STATES_PER_BLOCK * outputs[0].out + 4 * pruned.before.ffn)
        matrices = sum(layer.out**2 for layer in outputs)
        found.append(weights + FLOAT32 * (pruned.before.layers * (states + matrices) + LOGITS * length * rows))
    if pruned.step.searches:
        moments = pruned.before.layers * sum(layer.width**2 for layer in outputs)
        widest = max(layer.width for layer in outputs)
        found.append(weights + FLOAT32 * moments + FLOAT64 * MOMENT_SQUARES * widest**2)
    if needs_whole_model(pruned):
        found.append(weights + FLOAT32 * COMPARED_TOKENS * (outputs[0].out + rows))
    return max(found)


def walk_bytes(pruned: PrunePlan, value: int) -> float:
    """Of the work on one block, in numbers of `value` bytes, without the windows."""
    block = sum(layer.parameters for layer in pruned.anatomy.layers if layer.block == 0)
    if not pruned.calibrates:
        return float(block * value)
    solves = max(FLOAT64 * (SQUARES * one.width**2 + LAYERS * one.out * one.width) for one in _outputs(pruned))
    return STREAMS * block * value + solves + _gradients_bytes(pruned)


def stopped_bytes(pruned: PrunePlan, tokens: int, value: int) -> float:
    """Of windows of so many tokens that stand in front of the widest projection, in both models."""
    outputs = _outputs(pruned)
    width = max(layer.width for layer in outputs) + 3 * outputs[0].out
    return float(STREAMS * tokens * width * value)


def full_size_bytes(pruned: PrunePlan) -> float:
    """All weights in float32 and as they are read, as the proof's reference is built from them."""
    return FLOAT32 * _numbers(pruned.source) + sum(info.nbytes for info in pruned.source.tensors.values())


def parts_bytes(pruned: PrunePlan) -> int:
    """Of the step's journal: the tensors of the blocks that stay, and the triangles of the gradients' matrices."""
    stem = f"{pruned.anatomy.file_prefix}{pruned.anatomy.architecture.blocks}."
    blocks = sum(info.nbytes for name, info in pruned.checkpoint.tensors.items() if name.startswith(stem))
    return blocks + _gradients_bytes(pruned) // 2


def flops(pruned: PrunePlan, tokens: int) -> float:
    """Floating-point operations of the whole step.

    Args:
        tokens: of the calibration text; 0 without.
    """
    if not tokens:
        return 200.0 * _numbers(pruned.source)
    linear = sum(layer.parameters for layer in pruned.anatomy.layers)
    head = _vocabulary(pruned.source) * _outputs(pruned)[0].out if pruned.anatomy.kind == "decoder" else 0
    depth, outputs = pruned.before.layers, _outputs(pruned)
    sums = 2.0 * tokens * depth * sum(one.width**2 + 3 * one.out * one.width for one in outputs)
    solves = 30.0 * depth * sum(one.width**3 + one.out * one.width**2 for one in outputs)
    total = 2.0 * STREAMS * tokens * linear + sums + solves
    if takes_gradients(pruned):
        read = FISHER_TOKENS if pruned.step.importance == "obs" else TAYLOR_TOKENS
        total += 4.0 * min(tokens, read) * (linear + head)  # forward, and backward to the activations alone
    compared = min(tokens, COMPARED_TOKENS)
    if pruned.step.searches:
        total += 2.0 * min(tokens, MOMENT_TOKENS) * linear + sums + solves
        total += 2.0 * compared * len(pruned.candidates) * (linear + head)
    removed = pruned.before.layers - min(shape.layers for shape in pruned.candidates)
    if removed and needs_whole_model(pruned):
        total += compared * linear * (depth + removed * RETRIED)  # on average half of the blocks each time
    return total


def _gradients_bytes(pruned: PrunePlan) -> int:
    """Of the matrices [out, out] that gradients leave for the walk."""
    found = sum(layer.out**2 for layer in _outputs(pruned)) * pruned.before.layers * FLOAT32
    return found if takes_gradients(pruned) else 0


def _outputs(pruned: PrunePlan) -> tuple[LinearLayer, LinearLayer]:
    """The output projections of the attention and of the feed-forward network in the first block."""
    return output_of(pruned.anatomy, 0, "heads"), output_of(pruned.anatomy, 0, "ffn")


def _numbers(checkpoint: Checkpoint) -> int:
    return sum(prod(info.shape) for info in checkpoint.tensors.values())


def _vocabulary(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config.get("vocab_size") or 0)
