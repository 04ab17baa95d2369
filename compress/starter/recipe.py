"""The commented recipe."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from compress.model.checkpoint import Checkpoint
from compress.plan.planning import Plan, make_plan
from compress.recipe.json_schema import recipe_json_schema
from compress.recipe.source import load_recipe
from compress.starter.choices import Start
from compress.starter.quoting import plain_or_quoted

ABOUT = {
    "fp16": "a cast to 16 bits; also bf16, int8, int8-weight, int4",
    "bf16": "a cast to 16 bits; also fp16, int8, int8-weight, int4",
    "fp8": "8-bit floating-point weights and inputs, for GPUs that have them; int8-weight is nearest to the original",
    "int8": "8-bit weights and inputs, for servers with large batches; int8-weight is nearest to the original",
    "int8-weight": "8-bit weights, nearest to the original; int4 is half the size, int8 is for large batches",
    "int4": "4-bit weights, smallest; int8-weight is nearest to the original, int8 is for large batches",
    "nf4": "4-bit weights of bitsandbytes, which need no calibration; int4 is as small and nearer to the original",
    "int8-bnb": "LLM.int8 of bitsandbytes, which needs no calibration; int8-weight is nearer to the original",
}
READERS = {
    "safetensors": "loaded by everything",
    "compressed-tensors": "loaded by transformers and vLLM",
    "bitsandbytes": "loaded by transformers with bitsandbytes, and vLLM",
    "gguf": "run by llama.cpp",
    "gptq": "loaded by GPTQModel, vLLM, and transformers with optimum",
}


def recipe_text(start: Start) -> str:
    """The recipe as YAML, every line with its comment. Raises UsageError for a name that no YAML file can hold."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("compress.starter"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # YAML, not HTML: `scalar` quotes what came from outside
    )
    environment.filters |= {"scalar": plain_or_quoted}
    return environment.get_template("recipe.yaml.j2").render(
        start=start,
        decoder=start.kind == "decoder",
        measured=start.kind != "other",
        about=ABOUT[start.target.name],
        reads=READERS[start.format_name],
    )


def check_recipe(text: str, checkpoint: Checkpoint) -> Plan:
    """Loads and plans what is about to be written. Raises UsageError where it would not do."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "compress.yaml"
        file.write_text(text, encoding="utf-8")
        return make_plan(load_recipe(file), checkpoint)


def schema_text() -> str:
    """The JSON Schema of recipes, which the recipe's first line names for editors."""
    return json.dumps(recipe_json_schema(), indent=2, ensure_ascii=False) + "\n"
