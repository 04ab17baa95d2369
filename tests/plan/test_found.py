"""Recipes for models that nothing can be calibrated of, and storages that no loader reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_more

from compress.errors import UsageError
from compress.model.checkpoint import open_checkpoint
from compress.plan.found import class_note, found_note, unmeasured_note
from compress.plan.planning import Plan, make_plan
from compress.recipe.schema import Recipe


def planned(folder: Path, *, evaluate: Any = None, **step: Any) -> Plan:
    recipe = {"version": 1, "model": str(folder), "steps": [{"quantize": step}], "evaluate": evaluate}
    return make_plan(Recipe.model_validate(recipe), open_checkpoint(folder))


def test_defaults_that_need_calibration_are_off(tmp_path: Path) -> None:
    folder = tiny_more.tiny_gptj(tmp_path / "m")
    plan = planned(folder, target="int8", evaluate={"fidelity": {}})
    assert not plan.calibrates
    assert plan.recipe.steps[0].quantize.smooth is False
    assert plan.recipe.evaluate is not None  # a decoder's answers are measured all the same
    assert planned(tiny.tiny_llama(tmp_path / "l"), target="int8").calibrates


def test_calibration_in_so_many_words_is_refused_with_all_faults(tmp_path: Path) -> None:
    folder = tiny_more.tiny_t5(tmp_path / "m")
    tasks = {"tasks": [{"name": "next_sentence"}]}
    with pytest.raises(UsageError) as caught:
        planned(folder, target="int4", smooth=True, evaluate=tasks)
    assert "GPTQ needs calibration input, and for t5 there is none yet: use --algorithm rtn" in caught.value.message
    assert "smoothing needs calibration input" in caught.value.message


def test_nothing_is_evaluated_of_models_that_read_no_text(tmp_path: Path) -> None:
    plan = planned(tiny_more.tiny_vit(tmp_path / "m"), target="int8", evaluate={"fidelity": {}})
    assert plan.recipe.evaluate is None
    assert plan.recipe.bench is None
    assert "are not measured" in str(unmeasured_note(plan.anatomy))
    assert found_note(plan.anatomy) is None  # the table has an entry, if one without layers


def test_what_was_found_is_said_of_unknown_types(tmp_path: Path) -> None:
    parts = planned(tiny_more.tiny_gptj(tmp_path / "m"), target="int8").anatomy
    assert found_note(parts) == (
        "gptj is not in the table of model types: 12 linear layers were found by name in transformer.h; "
        "everything else is left alone"
    )
    assert unmeasured_note(parts) is None
    assert parts.blocks == ("transformer.h.0", "transformer.h.1")
    assert parts.untouched["transformer.wte.weight"] == "embedding, protected"


def test_blocks_of_two_lists_are_counted_through(tmp_path: Path) -> None:
    parts = planned(tiny_more.tiny_whisper(tmp_path / "m"), target="int8").anatomy
    assert parts.depth == 5
    assert parts.block_name(1) == "model.encoder.layers.1"
    assert parts.block_name(2) == "model.decoder.layers.0"
    assert {layer.block for layer in parts.layers} == set(range(5))


@pytest.mark.parametrize(
    ("make", "step", "reason", "way"),
    [
        (tiny_more.tiny_modernbert, {"target": "int4"}, "pack-quantized: stock transformers fails", "--format gptq or"),
        (tiny_more.tiny_t5, {"target": "int8-weight"}, "pack-quantized: stock transformers fails", "--target int8"),
        (tiny_more.tiny_vit, {"target": "int8-weight", "format": "gptq"}, "gptq: the loaders", "compressed-tensors"),
    ],
)
def test_storages_without_a_loader_are_refused(
    make: Any, step: dict[str, str], reason: str, way: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        planned(make(tmp_path / "m"), **step)
    assert reason in caught.value.message
    assert way in str(caught.value.hint)


def test_shared_embeddings_count_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_more.tiny_t5(tmp_path / "m")
    before = planned(folder, target="int8").parameters
    weights = load_file(folder / "model.safetensors")
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    weights |= {name: weights["shared.weight"].clone() for name in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    plan = planned(folder, target="int8")
    assert plan.parameters == before
    assert plan.anatomy.second_names == set(names)


def test_the_class_of_a_file_without_a_head_is_told(tmp_path: Path) -> None:
    folder = tiny_more.tiny_mpnet(tmp_path / "m")
    assert class_note(open_checkpoint(folder)) is None
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["MPNetForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    note = class_note(open_checkpoint(folder))
    assert note == (
        "config.json names MPNetForMaskedLM, but the file holds no head: it is read, and written, as MPNetModel"
    )
