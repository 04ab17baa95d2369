"""Experts in files and in stock classes: which layers there are, the walk's stand-in, and where a matrix lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_moe
import torch
import transformers
from safetensors.torch import load_file, save_file

from compress.errors import UsageError
from compress.model.anatomy import anatomy
from compress.model.blocks import BlockModel, run_block
from compress.model.checkpoint import open_checkpoint
from compress.model.experts import LinearExperts, expert_weight
from compress.model.fit import check_fit
from compress.model.load import build_model, load_original
from compress.model.moe import MIXTRAL, check_chosen

BUILDERS: dict[str, Callable[..., Path]] = {
    "mixtral": tiny_moe.tiny_mixtral,
    "qwen3_moe": tiny_moe.tiny_qwen3_moe,
}
PATHS = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}


@pytest.fixture(params=BUILDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return BUILDERS[request.param](tmp_path / request.param)


def test_every_expert_has_its_layers_and_the_router_stays(tmp_path: Path) -> None:
    parts = anatomy(open_checkpoint(tiny_moe.tiny_mixtral(tmp_path)))
    block = [layer for layer in parts.layers if layer.block == 0]
    assert [layer.fused for layer in block[:4]] == ["model.layers.0:qkv"] * 3 + ["model.layers.0:o"]
    assert [layer.name.removeprefix("model.layers.0.block_sparse_moe.") for layer in block[4:7]] == [
        "experts.0.w1",
        "experts.0.w3",
        "experts.0.w2",
    ]
    assert [layer.fused.partition(":")[2] for layer in block[4:7]] == ["experts.0.gate_up"] * 2 + ["experts.0.down"]
    assert {layer.served for layer in block[4:]} == {"model.layers.0:experts"}
    assert len(block) == 4 + 4 * 3
    assert parts.untouched["model.layers.1.block_sparse_moe.gate.weight"] == "router, protected"
    check_fit(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({"mlp_only_layers": [1]}, {0, 2}),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, {1}),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, set()),
        ({"mlp_only_layers": None}, {0, 1, 2}),
    ],
)
def test_dense_blocks_of_qwen3_moe(fields: dict[str, object], sparse: set[int], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_moe.tiny_qwen3_moe(tmp_path, **fields))
    parts = anatomy(checkpoint)
    check_fit(checkpoint)
    assert {layer.block for layer in parts.layers if ".experts." in layer.name} == sparse
    dense = [layer for layer in parts.layers if layer.name.endswith(".mlp.down_proj")]
    assert {layer.block for layer in dense} == {0, 1, 2} - sparse
    assert all(layer.served == layer.fused for layer in dense)
    assert len(BlockModel(checkpoint, parts, dtype=torch.float32, device="cpu")) == 3


def test_the_number_of_experts_goes_by_either_name(tmp_path: Path) -> None:
    """Files of the hub say num_experts where transformers 5 writes num_local_experts."""
    folder = tiny_moe.tiny_qwen3_moe(tmp_path)
    before = anatomy(open_checkpoint(folder)).layers
    config = json.loads((folder / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (folder / "config.json").write_text(json.dumps(config))
    assert anatomy(open_checkpoint(folder)).layers == before


def test_an_expert_that_is_missing_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if ".experts.3." in name)
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="weights do not fit") as caught:
        anatomy(open_checkpoint(folder))
    assert f"{lost}: missing" in caught.value.message


def test_stacked_experts_are_refused_with_the_way_to_save_them(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    with pytest.raises(UsageError, match="hold the experts of a block in one") as caught:
        anatomy(open_checkpoint(tmp_path / "stacked"))
    assert caught.value.hint is not None
    assert "save_original_format" in caught.value.hint


def test_the_walk_computes_what_the_stock_class_does(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    ids = torch.randint(256, (23,), generator=torch.Generator().manual_seed(3))
    stock = load_original(checkpoint, dtype=torch.float32, device="cpu")
    walked = BlockModel(checkpoint, anatomy(checkpoint), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        wanted = stock(input_ids=ids.unsqueeze(0), output_hidden_states=True).hidden_states
        hidden, calls = walked.inputs(ids)
        for index in range(len(walked)):
            with walked.block(index) as block:
                hidden = run_block(block, hidden, calls[index])
            if index + 1 < len(walked):  # the last one of the stock model is normed
                torch.testing.assert_close(hidden, wanted[index + 1])
        torch.testing.assert_close(stock.model.norm(hidden), wanted[-1])


def test_every_expert_is_called_even_without_tokens(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    walked = BlockModel(checkpoint, anatomy(checkpoint), dtype=torch.float32, device="cpu")
    rows: list[int] = []
    hidden, calls = walked.inputs(torch.tensor([7]))
    with walked.block(0) as block, torch.no_grad():
        (experts,) = [module for module in block.modules() if isinstance(module, LinearExperts)]
        for name, module in experts.named_modules():
            if isinstance(module, torch.nn.Linear) and name.startswith(("0", "1", "2", "3")):
                module.register_forward_pre_hook(lambda _module, args: rows.append(len(args[0])))
        run_block(block, hidden, calls[0])
    assert len(rows) == 4 * 3
    assert sorted(rows) == [0] * 6 + [1] * 6  # one token, two of four experts


def test_matrices_in_the_stock_model_are_those_of_the_file(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    experts = parts.architecture.experts
    assert experts is not None
    modules = dict(load_original(checkpoint, dtype=torch.float32, device="cpu").named_modules())
    for layer in parts.layers:
        found = expert_weight(modules, layer.name, experts)
        if ".experts." in layer.name:
            assert found is not None
            assert torch.equal(found, checkpoint.read(layer.tensor))
        else:
            assert found is None
    path = f"model.layers.0.{PATHS[checkpoint.model_type]}.experts"
    assert expert_weight(modules, f"{path}.4.{experts.gate}", experts) is None
    assert expert_weight(modules, f"{path}.0.other", experts) is None


def test_weights_in_memory_load_as_those_on_disk(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    state = checkpoint.read_many(checkpoint.tensors)
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        built = build_model(folder, state, dtype=torch.float32, device="cpu")(input_ids=ids).logits
        stock = load_original(checkpoint, dtype=torch.float32, device="cpu")(input_ids=ids).logits
    assert torch.equal(built, stock)


@pytest.mark.parametrize("chosen", [0, 5])
def test_more_experts_for_a_token_than_there_are(chosen: int) -> None:
    config = {"num_local_experts": 4, "num_experts_per_tok": chosen}
    with pytest.raises(UsageError, match=f"num_experts_per_tok is {chosen}; it must be from 1 to 4"):
        check_chosen("m", MIXTRAL, config, 2)
    check_chosen("m", MIXTRAL, config | {"num_experts_per_tok": 4}, 2)
    check_chosen("m", None, config, 2)
