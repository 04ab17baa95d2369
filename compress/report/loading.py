"""How each checkpoint format is loaded: the lines a user pastes, for the report and the model card."""

from __future__ import annotations

from dataclasses import dataclass

from compress.model.architectures import Kind

INSTALL = {
    "safetensors": "pip install transformers",
    "compressed-tensors": "pip install transformers compressed-tensors",
    "gptq": "pip install transformers gptqmodel optimum",
    "gptq_v2": "pip install transformers gptqmodel optimum",
    "bitsandbytes": "pip install transformers accelerate bitsandbytes",
}
VLLM_INSTALL = "pip install vllm"


@dataclass(frozen=True)
class Loading:
    """Attributes:
    install: the pip line for what runs this format: transformers, but for gguf.
    transformers: Python lines that load the model and its tokenizer there; none where nothing loads it.
    vllm: a shell line that serves it, or None where vLLM does not.
    note: what a reader has to know before, or None.
    """

    install: str
    transformers: tuple[str, ...]
    vllm: str | None
    note: str | None = None


_FIRST_SCHEME = (
    "The layers have several schemes. Load it as it stands here: with `dequantize=True` transformers would give all "
    "layers the first scheme."
)
_ZERO_POINTS = "transformers loads weights with zero points only with `dequantize=True`."
_VLLM_READS = " vLLM reads it as it is."
_NO_ZERO_POINTS = (
    "transformers cannot load it: it reads weights with zero points only with `dequantize=True`, which would give all "
    "layers the first of this model's schemes."
)

_EXPERTS = (
    "transformers cannot load it: it holds all experts of a block in one tensor, and reads none from the gptq format."
)


def loading(
    format_name: str,
    kind: Kind,
    folder: str,
    *,
    mixed: bool = False,
    zero_points: bool = False,
    experts: bool = False,
    architecture: str | None = None,
    served: bool = True,
) -> Loading:
    """The lines for `folder`, a path or a hub id.

    Args:
        mixed: its layers have several schemes.
        zero_points: some of its layers have zero points.
        experts: it has experts, each with matrices of its own.
        architecture: name of the class, for models that are no decoders or encoders of text.
        served: vLLM loads it; see `compress.plan.serving`.
    """
    if format_name == "gguf":
        return _gguf(folder)
    if format_name in ("gptq", "gptq_v2") and experts:
        return _only_vllm(folder, _EXPERTS, served)
    if format_name in ("gptq", "gptq_v2") and mixed:
        return _mixed_gptq(folder, served)
    dense = format_name == "compressed-tensors" and zero_points
    if dense and mixed:
        return _only_vllm(folder, _NO_ZERO_POINTS, served)
    auto = {"decoder": "AutoModelForCausalLM", "encoder": "AutoModel"}.get(kind, architecture or "AutoModel")
    reader, read_by = ("processor", "AutoProcessor") if kind == "other" else ("tokenizer", "AutoTokenizer")
    return Loading(
        install=INSTALL[format_name],
        transformers=(
            f"from transformers import {auto}, {read_by}{', CompressedTensorsConfig' if dense else ''}",
            "",
            *(("dense = CompressedTensorsConfig(dequantize=True)",) if dense else ()),
            f'model = {auto}.from_pretrained("{folder}"{", quantization_config=dense" if dense else ""})',
            f'{reader} = {read_by}.from_pretrained("{folder}")',
        ),
        vllm=f"vllm serve {folder}" if served and kind == "decoder" else None,
        note=_ZERO_POINTS + (_VLLM_READS if served else "")
        if dense
        else _FIRST_SCHEME
        if mixed and format_name == "compressed-tensors"
        else None,
    )


def _gguf(folder: str) -> Loading:
    """llama.cpp runs the one file; tokenizer and chat template are inside it."""
    return Loading(
        install="pip install xllamacpp",
        transformers=(
            "from xllamacpp import CommonParams, Server",
            "",
            "params = CommonParams()",
            f'params.model.path = "{folder}/model.gguf"',
            "server = Server(params)",
            'answer = server.handle_completions({"prompt": "Hello", "max_tokens": 32})',
        ),
        vllm=None,
    )


def _only_vllm(folder: str, why: str, served: bool) -> Loading:
    if not served:
        way = f"`compress quantize {folder} --target bf16 --dequantize` makes a dense model of it."
        return Loading(VLLM_INSTALL, (), None, f"{why} Nor does vLLM load it, as far as its sources tell. {way}")
    lines = ("from vllm import LLM", "", f'model = LLM("{folder}")')
    return Loading(VLLM_INSTALL, lines, f"vllm serve {folder}", why + _VLLM_READS)


def _mixed_gptq(folder: str, served: bool) -> Loading:
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
        vllm=f"vllm serve {folder}" if served else None,
    )
