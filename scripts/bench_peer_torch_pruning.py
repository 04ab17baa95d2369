"""The peer's side of bench_pruning.py: Torch-Pruning on the same model, to the same shape. Runs in its own environment.

    python scripts/bench_peer_torch_pruning.py MODEL WINDOWS OUTPUT IMPORTANCE FFN HEADS KV_HEADS

MODEL is a folder of the Llama kind, WINDOWS a safetensors file of int64 windows (read for taylor only), IMPORTANCE
magnitude or taylor, the rest the counts to keep. Scores are torch-pruning 1.6.1's own with its defaults, every layer is
ranked by itself, nothing is trained, and the hidden width stays whole.

What had to be worked around:
 1. Its graph is wrong for grouped queries inside scaled_dot_product_attention: the scores of the attention's 576
    columns come out with the 192 of the keys, and `view` raises, even where only FFN channels go. Eager attention,
    which repeats keys and values, is traced.
 2. The ratio of a group must be set by layer: the one ratio of its own LLM example also cuts the hidden width.
 3. It looks at heads only in groups that lose channels, so the attention gets a ratio of channels that
    `prune_head_dims=False` then ignores.
 4. With grouped queries its pruner takes the same number of query heads out of every group and never a key and value
    head. Whole groups (9/3 -> 6/2) are therefore chosen here, by the mean of its scores over a group, and removed
    through its graph. The rows of keys and values have no part in these scores: their indices map to no root.
 5. It does not write configs: the counts and `head_dim` are set here.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch_pruning as tp
import transformers
from safetensors.torch import load_file

Model = transformers.PreTrainedModel


def main(folder: str, windows: str, output: str, importance: str, ffn: str, heads: str, kv_heads: str) -> None:
    warnings.filterwarnings("ignore", message="Unwrapped parameters")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config, stored = model.config, transformers.AutoConfig.from_pretrained(folder).dtype
    config.use_cache = False
    wanted = (int(ffn), int(heads), int(kv_heads))
    if importance == "taylor":
        gradients(model, load_file(windows))
    score = {"magnitude": tp.importance.GroupMagnitudeImportance, "taylor": tp.importance.GroupTaylorImportance}
    prune(model, score[importance](), *wanted)
    config.head_dim = config.hidden_size // config.num_attention_heads if config.head_dim is None else config.head_dim
    config.intermediate_size, config.num_attention_heads, config.num_key_value_heads = wanted
    config.use_cache = True
    model.to(stored).save_pretrained(output)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(output)
    transformers.AutoModelForCausalLM.from_pretrained(output)  # raises where config and weights differ


def gradients(model: Model, windows: dict[str, torch.Tensor]) -> None:
    """Of the sum of the windows' mean losses."""
    for _, ids in sorted(windows.items()):
        model(input_ids=ids.unsqueeze(0), labels=ids.unsqueeze(0)).loss.backward()


def prune(model: Model, score: tp.importance.Importance, ffn: int, heads: int, kv_heads: int) -> None:
    config, ratios, counts = model.config, {}, {}
    before = (config.num_attention_heads, config.num_key_value_heads)
    groups = kv_heads < before[1]
    if groups and heads * before[1] != kv_heads * before[0]:
        raise SystemExit("whole groups of query heads, or the same number out of every group")
    for layer in model.model.layers:
        ratios[layer.mlp.gate_proj] = ratios[layer.mlp.up_proj] = share(ffn, config.intermediate_size)
        attention = layer.self_attn
        if heads < before[0] and not groups:
            counts |= {attention.q_proj: before[0], attention.k_proj: before[1], attention.v_proj: before[1]}
            ratios |= {one: share(heads, before[0]) for one in (attention.q_proj, attention.k_proj, attention.v_proj)}
    pruner = tp.pruner.BasePruner(
        model,
        example_inputs=torch.arange(1, 9).unsqueeze(0),
        importance=score,
        pruning_ratio=0.0,
        pruning_ratio_dict=ratios,
        ignored_layers=[model.lm_head, model.model.embed_tokens],
        num_heads=counts,
        prune_num_heads=bool(counts),
        prune_head_dims=False,
        head_pruning_ratio=share(heads, before[0]) if counts else 0.0,
    )
    pruner.step()
    if groups:
        for layer in model.model.layers:
            remove_groups(pruner.DG, layer.self_attn.o_proj, score, before[1], before[1] - kv_heads)


def share(kept: int, width: int) -> float:
    """A ratio to prune that leaves exactly `kept` of `width`: what it leaves is int(width * (1 - ratio))."""
    return 0.0 if kept == width else 1 - (kept + 0.5) / width


def remove_groups(
    graph: tp.DependencyGraph, output: torch.nn.Linear, score: tp.importance.Importance, groups: int, removed: int
) -> None:
    """Takes the query heads of the lowest KV groups, with their keys and values, out of one layer."""
    width = output.in_features // groups
    whole = graph.get_pruning_group(output, tp.prune_linear_in_channels, list(range(output.in_features)))
    lowest = score(whole).view(groups, width).mean(dim=1).argsort()[:removed].tolist()
    columns = [column for group in sorted(lowest) for column in range(group * width, (group + 1) * width)]
    graph.get_pruning_group(output, tp.prune_linear_in_channels, columns).prune()


if __name__ == "__main__":
    main(*sys.argv[1:])
