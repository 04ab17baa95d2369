from __future__ import annotations

import pytest
from huggingface_hub import ModelCard
from ruamel.yaml import YAML
from sample_report import sample_report, task_report

from compress.report.card import base_model, model_card, source_metadata
from compress.report.schema import Report, ServingPart

SOURCE = "---\nlicense: apache-2.0\nlanguage:\n- en\ndatasets: [secret]\n---\n# The original\n"


def card(report: Report | None = None, source: str | None = SOURCE, **options: str) -> str:
    settings = {"format_name": "compressed-tensors", "target": "int4", "kind": "decoder"} | options
    return model_card(report or sample_report(), source_card=source, **settings)  # type: ignore[arg-type]  # kind


def metadata(text: str) -> dict[str, object]:
    front = text.split("---\n")[1]
    loaded = YAML(typ="safe").load(front)
    assert isinstance(loaded, dict)
    return loaded


def test_front_matter_names_base_and_relation_and_carries_the_licence() -> None:
    found = metadata(card())
    assert found["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert found["base_model_relation"] == "quantized"
    assert found["license"] == "apache-2.0"
    assert found["language"] == ["en"]
    assert "datasets" not in found
    assert {"int4", "compressed-tensors"} <= set(found["tags"])  # type: ignore[call-overload]  # a list


@pytest.mark.parametrize("source", [None, "", "# no front matter", "---\n: [broken\n---\n", "---\n- a list\n---\n"])
def test_no_licence_is_invented(source: str | None) -> None:
    assert "license" not in metadata(card(source=source))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("org/model@1a2b3c", "org/model"),
        ("gpt2", "gpt2"),
        ("./models/smollm2", "smollm2"),
        ("/data/secret/models/smollm2/", "smollm2"),
        ("C:\\models\\smollm2", "smollm2"),
    ],
)
def test_base_model_is_an_id_or_a_name_never_a_path(source: str, name: str) -> None:
    assert base_model(source) == name


def test_nothing_that_differs_from_run_to_run() -> None:
    report = sample_report()
    again = report.model_copy(
        update={
            "created": "2026-01-01T00:00:00+00:00",
            "environment": {"cpu": "another"},
            "output": "/elsewhere",
            "measurements": tuple(
                part.model_copy(update={"value": (part.value or 0) * 2})
                if part.metric.startswith(("latency", "memory"))
                else part
                for part in report.measurements
            ),
        }
    )
    assert card(report) == card(again)


def test_how_to_load_fits_format_and_kind() -> None:
    assert "AutoModelForCausalLM.from_pretrained" in card()
    assert "pip install transformers compressed-tensors" in card()
    assert "vllm serve" in card()
    assert "gptqmodel" in card(format_name="gptq")
    encoder = card(kind="encoder")
    assert "AutoModel.from_pretrained" in encoder
    assert "vllm" not in encoder


def test_what_was_measured_and_how_it_is_defined() -> None:
    text = card()
    assert "| KL, mean | - | 0.0781 nats [0.0751, 0.0812] |" in text
    assert "Mean over predicted tokens of KL(original || result)" in text
    assert "latency" not in text


def test_evaluation_results_are_metadata_of_the_hub() -> None:
    index = metadata(card(task_report()))["model-index"]
    assert isinstance(index, list)
    (model,) = index
    assert model["name"] == "SmolLM2-135M-Instruct-int4"
    found = {result["dataset"]["name"]: result for result in model["results"]}
    assert set(found) == {"next_sentence", "arithmetic", "default"}
    assert found["arithmetic"]["dataset"]["type"] == "arithmetic.jsonl"
    assert found["arithmetic"]["dataset"]["args"]["items"] == 1000
    assert found["arithmetic"]["metrics"] == [{"type": "accuracy", "value": 53.0, "name": "acc"}]
    assert found["default"]["metrics"] == [{"type": "perplexity", "value": 19.6034}]
    assert "model-index" not in metadata(card(sample_report([], ())))


def test_the_hub_s_own_reader_takes_the_card() -> None:
    found = ModelCard(card(task_report())).data
    assert found.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert [result.metric_type for result in found.eval_results or ()] == ["accuracy", "accuracy", "perplexity"]


def test_tasks_and_answers_are_beside_the_original() -> None:
    text = card(task_report())
    assert "| `arithmetic` | 1,000 | 54.2 % [51.1, 57.3] | 53.0 % [49.9, 56.1] | 1.2 pt [0.1, 2.3] |" in text
    assert "| repeated 4-grams | 4.1 % [2.9, 5.3] | 5.9 % [4.1, 7.7] |" in text
    assert "| --- | ---: | ---: |" in text
    assert "The smallest drop that the items find" in text


def test_without_measurements_it_points_to_the_report() -> None:
    assert "are in `report/`" in card(sample_report([], ()))


def test_source_metadata_reads_windows_line_ends() -> None:
    assert source_metadata("---\r\nlicense: mit\r\n---\r\n# x") == {"license": "mit"}


def test_vllm_is_named_only_where_the_report_says_that_it_loads() -> None:
    loads, not_so = (
        sample_report().model_copy(update={"serving": (ServingPart(engine="vLLM", loads=loads, reasons=("why",)),)})
        for loads in (True, False)
    )
    assert "vllm serve" in card(loads)
    assert "- why" in card(loads)
    assert "vllm serve" not in card(not_so)


def test_what_a_reader_should_know_of_the_run_stands_among_the_limits() -> None:
    report = sample_report()
    step = report.steps[0]
    noted = step.model_copy(update={"notes": ("the model was quantized already (gptq)",)})
    limits = card(report.model_copy(update={"steps": (noted,)})).split("## Limits")[1]
    assert "- The model was quantized already (gptq)." in limits
