"""How each checkpoint format is loaded: the lines a user pastes, for the report and the model card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["decoder", "encoder"]

INSTALL = {
    "safetensors": "pip install transformers",
    "compressed-tensors": "pip install transformers compressed-tensors",
    "gptq": "pip install transformers gptqmodel optimum",
}
VLLM_INSTALL = "pip install vllm"


@dataclass(frozen=True)
class Loading:
    """Attributes:
    install: the pip line for transformers with this format.
    transformers: Python lines that load the model and its tokenizer.
    vllm: a shell line that serves it, or None where vLLM does not.
    """

    install: str
    transformers: tuple[str, ...]
    vllm: str | None


def loading(format_name: str, kind: Kind, folder: str, *, mixed: bool = False) -> Loading:
    """The lines for `folder`, a path or a hub id; `mixed`: its layers have several schemes."""
    if format_name == "gptq" and mixed:
        return _mixed_gptq(folder)
    auto = "AutoModelForCausalLM" if kind == "decoder" else "AutoModel"
    return Loading(
        install=INSTALL[format_name],
        transformers=(
            f"from transformers import {auto}, AutoTokenizer",
            "",
            f'model = {auto}.from_pretrained("{folder}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
        ),
        vllm=f"vllm serve {folder}" if kind == "decoder" else None,
    )


def _mixed_gptq(folder: str) -> Loading:
    """transformers reads gptq through optimum, which gives all layers one scheme; GPTQModel itself knows the rules."""
    return Loading(
        install="pip install transformers gptqmodel",
        transformers=(
            "from gptqmodel import GPTQModel",
            "from transformers import AutoTokenizer",
            "",
            f'model = GPTQModel.load("{folder}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
        ),
        vllm=f"vllm serve {folder}",
    )
