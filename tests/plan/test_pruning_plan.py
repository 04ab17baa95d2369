"""What the step `prune` promises and what it refuses, over tiny checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_more
import torch
from safetensors.torch import save_file

from compress.errors import UsageError
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.model.shapes import Shape
from compress.plan.planning import Plan, make_plan
from compress.plan.pruning import PrunePlan, with_shape
from compress.recipe.origin import Origin
from compress.recipe.schema import Recipe

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16}


def recipe(folder: Path | str, quantize: dict[str, Any] | None = None, text: Any = None, **step: Any) -> Recipe:
    """Options as in `compress prune`: a fault names `--keep-heads` and not a path."""
    options = {
        ("steps", 0, "prune", "keep", name): f"--keep-{name.replace('_', '-')}" for name in Shape.__annotations__
    }
    options |= {
        ("steps", 0, "prune", name): f"--{name}".replace("_", "-") for name in ("params", "size", "ffn_multiple")
    }
    steps = [{"prune": step}, *([] if quantize is None else [{"quantize": quantize}])]
    fields = {"version": 1, "model": str(folder), "steps": steps} | ({"calibration": text} if text else {})
    return Recipe.model_validate(fields).traced(Origin(options=options))


def planned(folder: Path, quantize: dict[str, Any] | None = None, text: Any = None, **step: Any) -> Plan:
    return make_plan(recipe(folder, quantize, text, **step), open_checkpoint(folder))


def pruned(folder: Path, quantize: dict[str, Any] | None = None, **step: Any) -> PrunePlan:
    plan = planned(folder, quantize, **step).pruned
    assert plan is not None
    return plan


def refusal(folder: Path, text: Any = None, **step: Any) -> list[str]:
    with pytest.raises(UsageError) as caught:
        planned(folder, text=text, **step)
    return caught.value.message.splitlines()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """8 query heads over 2 key and value heads, as TinyLlama in H14; 4 layers."""
    return tiny.tiny_llama(tmp_path / "llama", intermediate_size=512, num_hidden_layers=4)


# H14


@pytest.mark.parametrize(("share", "heads"), [(0.75, 6), ("50%", 4), (0.3, 2), (0.6, 4), (0.625, 6)])
def test_shares_of_heads_become_the_nearest_legal_number(share: Any, heads: int, llama: Path) -> None:
    plan = pruned(llama, keep={"heads": share})
    assert plan.after == Shape(512, heads, 2, 4)
    told = [note for note in plan.notes if note.startswith("heads: ")]
    assert bool(told) == (share not in (0.75, "50%"))
    assert all(str(heads) in note for note in told)


def test_a_share_that_rounds_to_all_of_them(llama: Path) -> None:
    (line,) = refusal(llama, keep={"heads": 0.99})
    assert line.startswith("--keep-heads: 0.99 of 8 query heads is 7.92, and the nearest possible number is all 8")
    assert "nothing would be removed; the nearest number below is 6" in line


def test_seven_heads_over_two(llama: Path) -> None:
    (line,) = refusal(llama, keep={"heads": 7})
    assert line.startswith("--keep-heads: 7 query heads are not possible (each of the 2 key and value heads serves as")
    assert line.endswith("the nearest possible numbers are 6 and 8, which is all of them")


def test_another_number_of_groups_is_offered(llama: Path) -> None:
    (line,) = refusal(llama, keep={"heads": 3})
    assert line.endswith("the nearest possible numbers are 2 and 4. With kv_heads 1 it can be 3")


@pytest.mark.parametrize(
    ("name", "total", "most"), [("heads", 8, 6), ("kv_heads", 2, 1), ("ffn", 512, 448), ("layers", 4, 3)]
)
def test_more_than_there_are(name: str, total: int, most: int, llama: Path) -> None:
    (line,) = refusal(llama, keep={name: total + 1})
    assert f"{total + 1} is more than the {total} " in line
    assert f"to remove any, keep at most {most}" in line


def test_groups_of_heads(tmp_path: Path) -> None:
    """MHA: a query head goes with its key and value head, whichever is named; MQA: only queries."""
    mha = tiny.tiny_llama(tmp_path / "mha", num_key_value_heads=8)
    for keep in ({"kv_heads": 4}, {"heads": 4}, {"heads": 0.5}, {"kv_heads": 4, "heads": 4}):
        assert pruned(mha, keep=keep).after == Shape(128, 4, 4, 2)
    assert pruned(mha, keep={"heads": 7}).after == Shape(128, 7, 7, 2)
    assert refusal(mha, keep={"heads": 0.99})[0].endswith("nothing would be removed; the nearest number below is 7")
    assert refusal(mha, keep={"heads": 4, "kv_heads": 5})[0].endswith("With kv_heads 4 it can be 4")
    mqa = tiny.tiny_llama(tmp_path / "mqa", num_key_value_heads=1)
    assert pruned(mqa, keep={"heads": 5}).after == Shape(128, 5, 1, 2)
    assert "there is no smaller one" in refusal(mqa, keep={"kv_heads": 0.5})[0]


@pytest.mark.parametrize(
    ("keep", "after"),
    [
        ({"kv_heads": 1}, (4, 1)),
        ({"kv_heads": 0.5, "heads": 0.25}, (2, 1)),
        ({"kv_heads": 2, "heads": 6}, (6, 2)),
        ({"kv_heads": 1, "heads": 3}, (3, 1)),
        ({"kv_heads": 1, "heads": 0.9}, (4, 1)),
    ],
)
def test_whole_groups_first_then_heads_of_each(keep: dict[str, Any], after: tuple[int, int], llama: Path) -> None:
    plan = pruned(llama, keep=keep)
    assert (plan.after.heads, plan.after.kv_heads) == after
    assert plan.checkpoint.config["num_attention_heads"] == after[0]
    assert plan.checkpoint.config["head_dim"] == 8


def test_more_heads_than_the_kept_groups_have(llama: Path) -> None:
    (line,) = refusal(llama, keep={"kv_heads": 1, "heads": 6})
    assert "6 query heads are not possible (one key and value head serves all of them, 4 at most)" in line
    assert "the nearest possible number is 4. With kv_heads 2 it can be 6" in line


# Rules of the config classes


def test_numbers_that_gemma_cannot_state(tmp_path: Path) -> None:
    gemma = tiny.tiny_gemma3(tmp_path / "m")
    (line,) = refusal(gemma, keep={"heads": 6})
    assert "gemma3_text takes only numbers of query heads that divide the hidden size 64" in line
    assert line.endswith("the nearest possible numbers are 4 and 8, which is all of them")
    assert pruned(gemma, keep={"heads": 4}).after.heads == 4


def test_a_llama_becomes_a_mistral_and_says_so(llama: Path) -> None:
    plan = pruned(llama, keep={"heads": 6})
    assert plan.checkpoint.model_type == "mistral"
    assert any("written as model type mistral" in note for note in plan.notes)
    assert pruned(llama, keep={"heads": 4}).checkpoint.model_type == "llama"


def test_qwen2_says_what_vllm_does(tmp_path: Path) -> None:
    qwen = tiny.tiny_qwen2(tmp_path / "m")
    assert any("vLLM's own qwen2 code" in note for note in pruned(qwen, keep={"heads": 4}).notes)
    assert not any("qwen2" in note for note in pruned(qwen, keep={"ffn": 0.5}).notes)


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "distilbert", "gpt_neox", "olmo2"])
def test_heads_that_are_fixed_are_refused_and_the_rest_offered(name: str, tmp_path: Path) -> None:
    folder = getattr(tiny, f"tiny_{name}")(tmp_path / "m")
    lines = refusal(folder, keep={"heads": 2, "kv_heads": 1})
    assert [line.partition(":")[0] for line in lines] == ["--keep-heads", "--keep-kv-heads"]
    assert all("cannot be pruned" in line and line.endswith("`ffn` and `layers` can be") for line in lines)
    plan = pruned(folder, keep={"ffn": 0.5, "layers": 1})
    assert (plan.after.ffn, plan.after.layers, plan.after.heads) == (plan.before.ffn // 2, 1, plan.before.heads)
    assert pruned(folder, keep={"layers": 1, "heads": plan.before.heads}).after.heads == plan.before.heads


def test_layers_that_cannot_go(tmp_path: Path) -> None:
    folder = tiny.tiny_gpt2(tmp_path / "m", scale_attn_by_inverse_layer_idx=True)
    (line,) = refusal(folder, keep={"layers": 1})
    assert line.startswith("--keep-layers: layers of this model cannot be removed: its attention is scaled")
    assert refusal(folder, keep={"heads": 2})[0].endswith("`ffn` can be")
    assert all(shape.layers == 2 for shape in pruned(folder, params=0.8).candidates)


def test_one_layer_of_each_kind_stays(tmp_path: Path) -> None:
    folder = tiny.tiny_gemma3(tmp_path / "m")
    (line,) = refusal(folder, keep={"layers": 1})
    assert "2 kinds of layers, and one of each stays" in line
    assert "the nearest possible number is 2" in line
    assert all(shape.layers >= 2 for shape in pruned(folder, params=0.4).candidates)


# Widths


@pytest.mark.parametrize(
    ("width", "quantize", "multiple"),
    [
        (512, None, 64),
        (1536, None, 64),
        (128, None, 32),
        (96, None, 16),
        (64, None, 16),
        (100, None, 4),
        (101, None, 1),
        (512, {"target": "int4"}, 64),
        (512, {"target": "int4", "group_size": 32}, 64),
        (128, {"target": "int4"}, 64),
        (96, {"target": "int4"}, 32),
        (96, {"target": "int8"}, 16),
        (96, {"target": "int8-weight", "format": "gguf"}, 32),
    ],
)
def test_auto_multiple(width: int, quantize: Any, multiple: int, tmp_path: Path) -> None:
    plan = pruned(tiny.tiny_llama(tmp_path / "m", intermediate_size=width), quantize, keep={"ffn": 0.01})
    assert plan.after.ffn == multiple


def test_auto_multiple_is_128_where_groups_of_128_follow(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "head_dim": 16, "intermediate_size": 1024}
    folder = tiny.tiny_llama(tmp_path / "m", **sizes)
    assert pruned(folder, {"target": "int4"}, keep={"ffn": 0.01}).after.ffn == 128
    assert pruned(folder, {"target": "int4", "group_size": 64}, keep={"ffn": 0.01}).after.ffn == 64
    quantized = planned(folder, {"target": "int4"}, keep={"ffn": 0.6})
    assert {scheme.group_size for scheme in quantized.schemes.values()} == {128}
    assert quantized.checkpoint.config["intermediate_size"] == 640


@pytest.mark.parametrize(("share", "width"), [(0.9, 448), (0.75, 384), (0.6875, 384), (0.68, 320), (0.001, 64)])
def test_shares_of_channels(share: float, width: int, llama: Path) -> None:
    """0.6875 of 512 is 352, as far from 320 as from 384."""
    plan = pruned(llama, keep={"ffn": share})
    assert plan.after == Shape(width, 8, 2, 4)
    assert bool(plan.notes) == (share != 0.75)


def test_a_count_of_channels_is_legal_or_wrong(llama: Path) -> None:
    assert pruned(llama, keep={"ffn": 320}).after.ffn == 320
    (line,) = refusal(llama, keep={"ffn": 300})
    assert line.startswith(
        "--keep-ffn: 300 feed-forward channels are not possible (the number of channels is a multiple"
    )
    assert line.endswith("the nearest possible numbers are 256 and 320")
    assert refusal(llama, keep={"ffn": 1})[0].startswith("--keep-ffn: 1 feed-forward channel is not possible (")
    assert pruned(llama, keep={"ffn": 300}, ffn_multiple=4).after.ffn == 300


def test_a_multiple_that_fits_nothing(llama: Path) -> None:
    (line,) = refusal(llama, keep={"ffn": 0.5}, ffn_multiple=600)
    assert line == "--ffn-multiple: there is no multiple of 600 below the model's 512 channels"


def test_all_faults_at_once(llama: Path) -> None:
    lines = refusal(llama, keep={"ffn": 300, "heads": 7, "kv_heads": 3, "layers": 9})
    assert [line.partition(":")[0] for line in lines] == ["--keep-ffn", "--keep-kv-heads", "--keep-layers"]


def test_nothing_removed(llama: Path) -> None:
    (line,) = refusal(llama, keep={"heads": 8, "layers": 4})
    assert "nothing would be removed (ffn 512, heads 8, kv_heads 2, layers 4)" in line
    assert pruned(llama, keep={"heads": 8, "layers": 3}).after == Shape(512, 8, 2, 3)


# Text


def test_fewer_tokens_than_columns(llama: Path) -> None:
    few = {"samples": 3, "length": 100}
    (line,) = refusal(llama, few, keep={"ffn": 0.5})
    assert (
        "3 windows of 100 tokens leave 200 tokens beside what is held out, fewer than the 256 input columns of "
        "model.layers.0.mlp.down_proj that stay" in line
    )
    assert "--samples" in line
    assert planned(llama, text=few, keep={"ffn": 0.5}, compensate=False, importance="activation").calibrates
    assert planned(llama, text={"samples": 4, "length": 100}, keep={"ffn": 0.5}).calibrates
    assert "leave 0 tokens" in refusal(llama, {"samples": 1, "length": 600}, keep={"layers": 3})[0]
    assert "--samples" in refusal(llama, few, keep={"ffn": 0.5}, compensate=False)[0]


# Exact files


def written(plan: Plan, folder: Path) -> int:
    """Bytes of the planned files, written by the safetensors library."""
    for shard in plan.shards:
        tensors = {one.name: torch.zeros(one.shape, dtype=TORCH[one.dtype]) for one in shard.tensors}
        save_file(tensors, folder / shard.file, metadata={"format": "pt"})
        assert (folder / shard.file).stat().st_size == shard.nbytes
    return sum((folder / shard.file).stat().st_size for shard in plan.shards)


@pytest.mark.parametrize("build", [tiny.tiny_llama, tiny.tiny_gemma, tiny.tiny_gpt2, tiny_more.tiny_modernbert])
def test_planned_files_are_exact(build: Any, tmp_path: Path) -> None:
    plan = planned(build(tmp_path / "m", dtype=torch.bfloat16), keep={"ffn": 0.5}, max_shard_size="40kB")
    assert len(plan.shards) > 1
    assert written(plan, tmp_path) == plan.weight_bytes == plan.checkpoint.weight_bytes
    assert {info.shard for info in plan.checkpoint.tensors.values()} == {shard.file for shard in plan.shards}


def test_plan_is_of_the_pruned_model(llama: Path) -> None:
    plan = planned(llama, keep={"ffn": 0.5, "layers": 3})
    assert plan.output == Path("llama-pruned")
    assert plan.original.folder == llama
    assert (plan.anatomy.depth, plan.checkpoint.config["num_hidden_layers"]) == (3, 3)
    assert plan.checkpoint.has_weights is False
    assert plan.parameters == 2 * 256 * 64 + 64 + 3 * (2 * 64 * 64 + 2 * 16 * 64 + 3 * 256 * 64 + 2 * 64)


# Budgets


@pytest.mark.parametrize("factor", ["0.9x", "0.8x", "0.5x", "0.35x"])
@pytest.mark.parametrize("build", [tiny.tiny_llama, tiny.tiny_gemma3, tiny.tiny_qwen2, tiny_more.tiny_modernbert])
def test_candidates_for_parameters(build: Any, factor: str, tmp_path: Path) -> None:
    folder = build(tmp_path / "m", vocab_size=260, intermediate_size=512)
    before = sum(info.nbytes // 4 for info in open_checkpoint(folder).tensors.values())  # float32
    budget = float(factor[:-1]) * before
    plan = pruned(folder, params=factor)

    def count(shape: Shape) -> int:
        return planned(folder, keep=asked(shape, plan.before), ffn_multiple=1).parameters

    counts = [count(shape) for shape in plan.candidates]
    assert 1 <= len(counts) <= 12
    assert counts == sorted(counts, reverse=True)
    assert len(set(plan.candidates)) == len(counts)
    assert all(count <= budget for count in counts)
    assert all(shape.ffn % 64 == 0 for shape in plan.candidates)
    wider = [replace(shape, ffn=shape.ffn + 64) for shape in plan.candidates if shape.ffn + 64 < 512]
    assert all(count(shape) > budget for shape in wider)


def asked(shape: Shape, before: Shape) -> dict[str, int]:
    """What to keep for a shape; heads are named only where they can be pruned."""
    names = ["ffn", "layers", *(["heads", "kv_heads"] if shape.heads != before.heads else [])]
    return {name: getattr(shape, name) for name in names}


def test_candidates_for_a_size(llama: Path) -> None:
    plan = planned(llama, size="1MB")
    assert plan.pruned is not None
    assert len(plan.pruned.candidates) > 1
    for shape in plan.pruned.candidates:
        assert 0.9e6 < planned(llama, keep=asked(shape, plan.pruned.before)).weight_bytes <= 1e6
    kinds = {(shape.ffn < 512, shape.heads < 8, shape.layers < 4) for shape in plan.pruned.candidates}
    assert len(kinds) > 1


def test_budgets_that_cannot_be_met(llama: Path) -> None:
    (line,) = refusal(llama, size="1kB")
    assert line.startswith("--size: the weight files of the smallest shape that this model can have take 0.")
    least = line.rpartition(" ")[2]
    assert pruned(llama, size=least).candidates
    (line,) = refusal(llama, params="0.01x")
    assert pruned(llama, params=line.rpartition("holds ")[2].partition(" ")[0]).candidates


def test_a_budget_that_is_met_already(llama: Path) -> None:
    (line,) = refusal(llama, size="1GB")
    assert "already: nothing would be removed" in line


def test_only_ffn_and_depth_where_heads_are_fixed(tmp_path: Path) -> None:
    plan = pruned(tiny.tiny_bert(tmp_path / "m", intermediate_size=512), params="0.7x")
    assert {shape.heads for shape in plan.candidates} == {4}


def test_the_chosen_shape_and_the_layers_that_stay(tmp_path: Path) -> None:
    folder = tiny.tiny_gemma3(tmp_path / "m", intermediate_size=512)
    plan = pruned(folder, params="0.6x")
    shape = Shape(256, 4, 2, 2)
    chosen = with_shape(plan, [shape], (1, 2))
    assert chosen.candidates == (shape,)
    assert chosen.checkpoint.config["layer_types"] == ["full_attention", "sliding_attention"]
    first = with_shape(plan, [shape])
    assert first.checkpoint.config["layer_types"] == ["sliding_attention", "full_attention"]
    assert first.checkpoint.tensors == chosen.checkpoint.tensors
    assert first.shards == chosen.shards
    assert any("tensor parallelism" in note for note in chosen.notes)
    assert not any("tensor parallelism" in note for note in with_shape(chosen, [Shape(256, 8, 2, 2)]).notes)


# Models that cannot be pruned


def test_a_quantized_model_only_dequantized(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UsageError, match="quantized already") as caught:
        planned(folder, keep={"ffn": 0.5})
    assert "--dequantize" in str(caught.value.hint)


def test_an_unknown_type_and_unlike_layers(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="t5"):
        planned(tiny_more.tiny_t5(tmp_path / "t5"), keep={"ffn": 0.5})
    checkpoint = open_checkpoint(llama)
    tensors = dict(checkpoint.tensors)
    for name, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
        key = f"model.layers.2.mlp.{name}.weight"
        tensors[key] = replace(tensors[key], shape=shape)
    odd: Checkpoint = replace(checkpoint, tensors=tensors)
    with pytest.raises(UsageError, match=r"model.layers.2.mlp.gate_proj: 96 x 64"):
        make_plan(recipe(llama, keep={"ffn": 0.5}), odd)
