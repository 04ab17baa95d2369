"""The process behind `proof.prove`: a job, or a list of jobs, in JSON on stdin; what was found in JSON on stdout.

The checks, in this order; a folder that fails one of the first five is not looked at further:

    files        every planned tensor is there with its dtype and shape, and nothing else
    original     tensors that were not quantized equal the original's, replaced ones what was planned
    config       config.json equals the planned one, or the original's but for quantization and cast
    side files   tokenizer and the like equal the original's, byte by byte, and there is no other one
    loading      the loader finds every weight that it expects and no other
    shapes       the parameters of the loaded model have the planned shapes (dense folders)
    outputs      finite, and equal to those of the measured model up to rounding
    weights      dequantized weights equal ours, bit for bit
    cache        greedy decoding with and without cache agrees (decoders)
    tie          tied embeddings share their memory
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compress.divergence import token_kl
from compress.errors import CompressError
from compress.formats import bitsandbytes, gguf_check, proof_blocks, proof_inputs
from compress.formats.plain import cast_config
from compress.formats.proof import ProofCheck, ProofRecord
from compress.formats.proof_inputs import read_cases
from compress.formats.proof_original import check_of, check_original
from compress.formats.read import Reader, open_reader
from compress.formats.rounded_inputs import round_inputs_of
from compress.formats.rounded_products import take_back_rounding
from compress.model.architectures import ARCHITECTURES
from compress.model.checkpoint import CONFIG_FILE, Checkpoint, open_checkpoint, parse_config
from compress.model.experts import exact_experts, expert_weight
from compress.model.gguf_header import read_gguf_header
from compress.model.load import build_model, load_original
from compress.model.naming import module_finder
from compress.model.safetensors_header import HeaderError, read_header
from compress.model.sidefiles import CARD, SOURCE_CARD, side_files
from compress.model.zero_points import needs_dequantizing
from compress.orphans import die_with_parent

KL_LIMIT = 1e-5
"""Mean KL divergence, nats per token."""
DIFFERENCE_LIMIT = 1e-3
"""Largest difference of an output, and largest gap that passes for a tie, as shares of the outputs' range."""
NEW_TOKENS = 16
_ROWS = 16
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}
"""What the first BERT models called the parameters of their norms."""


@dataclass(frozen=True)
class Outputs:
    """How the outputs compare. `difference` is a share of `span`, the range of the measured outputs."""

    finite: bool
    kl_mean: float | None
    difference: float
    span: float
    windows: int
    tokens: int


def main() -> None:
    answer_to = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # Whatever a library prints must not end up in the answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asked = json.load(sys.stdin)
    many = isinstance(asked, list)
    for parent in {job["parent"] for job in (asked if many else [asked])}:
        die_with_parent(parent)
    answer = [asdict(run_one_of_many(job)) for job in asked] if many else asdict(run(asked))
    with answer_to:
        json.dump(answer, answer_to)


def run_one_of_many(job: Mapping[str, Any]) -> ProofRecord:
    """As `run`; what would end the process is a failed check, so that the other jobs have their answers."""
    try:
        return run(job)
    except Exception as error:  # noqa: BLE001 - whatever a loader raises is an answer about this folder
        traceback.print_exc()
        fault = ProofCheck("process", False, f"{type(error).__name__}: {error}")
        return ProofRecord("none", (fault,), None, None, 0, 0)


def run(job: Mapping[str, Any]) -> ProofRecord:
    """All checks of one job; see `proof.ProofJob` for its keys."""
    torch.set_num_threads(job["threads"])
    stage = Path(job["stage"])
    stock = job["loader"] == "stock"
    method = loader_name(stage) if stock else "independent reader"
    method = proof_blocks.METHOD if job["by_block"] else method
    checks = [check_files(stage, job["planned"])]
    if checks[-1].passed and job["source"] is not None:
        source = Path(job["source"])
        checks.append(check_original(stage, source, job["replaced_sha256"], job["names"]))
        checks.append(check_config(stage, source, job["config"]))
        checks.append(check_side_files(stage, source, trust_remote_code=job["trust_remote_code"]))
    if not all(check.passed for check in checks):
        return ProofRecord(method, tuple(checks), None, None, 0, 0)
    if job["by_block"]:
        walked = proof_blocks.walk_checks(
            stage,
            Path(job["source"]) if job["names"] is None else stage,
            Path(job["logits"]),
            job["weight_sha256"],
            DIFFERENCE_LIMIT,
        )
        checks += walked.checks
        return ProofRecord(method, tuple(checks), None, walked.difference, walked.windows, walked.tokens)
    try:
        model = load(stage, stock=stock, trust_remote_code=job["trust_remote_code"])
    except CompressError as error:
        checks.append(ProofCheck("loading", False, error.message))
        return ProofRecord(method, tuple(checks), None, None, 0, 0)
    checks.append(ProofCheck("loading", True, f"{type(model).__name__}, no weight missing or left over"))
    if stock and not open_checkpoint(stage).is_quantized:
        checks.append(check_shapes(model, job["planned"], every=job["names"] is not None))
        if not checks[-1].passed:
            return ProofRecord(method, tuple(checks), None, None, 0, 0)
    decoder = job["kind"] == "decoder"
    outputs = compare_outputs(model, Path(job["logits"]), job["kind"])
    checks.append(check_outputs(outputs))
    if job["weight_sha256"]:
        # compressed-tensors unpacks weights at the first forward pass, so this comes after it.
        checks.append(check_weights(model, job["weight_sha256"], stage))
    if decoder:
        prompt = next(read_cases(Path(job["logits"])))[0]["input_ids"][0]
        checks.append(check_cache(model, prompt, outputs.span))
    checks.append(check_tie(model))
    if open_checkpoint(stage).is_gguf and gguf_check.llama_version() is not None:
        run = gguf_check.check_llama(stage, Path(job["logits"]), job["threads"])
        checks += [] if run is None else [run]
    return ProofRecord(method, tuple(checks), outputs.kl_mean, outputs.difference, outputs.windows, outputs.tokens)


def loader_name(stage: Path) -> str:
    """Stock transformers, and what it has to be told."""
    told = ", dequantize=True" if needs_dequantizing(parse_config(stage / CONFIG_FILE)) else ""
    return f"transformers {transformers.__version__}{told}"


def load(stage: Path, *, stock: bool, trust_remote_code: bool) -> PreTrainedModel:
    """The folder in float32, through stock `from_pretrained` or through the reader. Raises CompressError."""
    if stock:
        checkpoint = open_checkpoint(stage)
        model = load_original(checkpoint, dtype=torch.float32, device="cpu", trust_remote_code=trust_remote_code)
        bitsandbytes.exact(model)
        exact_experts(model, torch.float32)
        if needs_dequantizing(checkpoint.config):
            take_back_rounding(model, stage)
        return model
    reader = open_reader(stage)
    state = reader.state_dict(torch.float32)
    model = build_model(stage, state, dtype=torch.float32, device="cpu", trust_remote_code=trust_remote_code)
    round_inputs_of(model, {name: reader.scheme(name) for name in reader.quantized_names})
    return model


def check_files(stage: Path, planned: list[dict[str, Any]]) -> ProofCheck:
    """The weight files of the folder against the plan."""
    faults = []
    names = {shard["file"] for shard in planned}
    there = [*stage.glob("*.safetensors"), *stage.glob("*.gguf")]
    faults += [f"{path.name} was not planned" for path in there if path.name not in names]
    count = 0
    for shard in planned:
        path = stage / shard["file"]
        try:
            header = read_gguf_header(path) if path.suffix == ".gguf" else read_header(path)
            found = {tensor.name: [tensor.dtype, list(tensor.shape)] for tensor in header}
        except (HeaderError, OSError) as error:
            faults.append(f"{path.name}: {error}")
            continue
        wanted = shard["tensors"]
        count += len(wanted)
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                faults.append(f"{name}: planned {_form(wanted.get(name))}, found {_form(found.get(name))}")
        if path.stat().st_size != shard["nbytes"]:
            faults.append(f"{path.name}: planned {shard['nbytes']} bytes, found {path.stat().st_size}")
    return check_of("files", faults, f"{count} tensors in {len(planned)} files, as planned")


def check_config(stage: Path, source: Path, planned: Mapping[str, Any] | None = None) -> ProofCheck:
    """config.json against the planned one, or the original's; a plain folder is a cast then, whose dtype its tensors
    tell."""
    try:
        result, original = open_checkpoint(stage), open_checkpoint(source)
    except CompressError as error:
        return ProofCheck("config", False, error.message)
    cast = None if result.is_quantized else _cast(result)
    expected = original.config if cast is None else cast_config(original.config, cast)
    if planned is not None:
        expected = planned
    faults = [
        f"{key}: found {_json(result.config, key)}, expected {_json(expected, key)}"
        for key in sorted((result.config.keys() | expected.keys()) - {"quantization_config"})
        if _json(result.config, key) != _json(expected, key)
    ]
    good = "the original's, but for quantization and cast" if planned is None else "the planned one"
    return check_of("config", faults, f"config.json equals {good}")


def check_side_files(stage: Path, source: Path, *, trust_remote_code: bool) -> ProofCheck:
    """Side files against the original's, whose README.md goes by another name here."""
    wanted = {path.as_posix() for path in side_files(source, trust_remote_code=trust_remote_code)}
    # Code that was not trusted must not be there either.
    found = {path.as_posix() for path in side_files(stage, trust_remote_code=True)}
    renamed = {SOURCE_CARD} if CARD in wanted else set()
    faults = [f"{name}: the original has no such file" for name in sorted(found - wanted - renamed - {CARD})]
    for name in sorted(wanted):
        target = SOURCE_CARD if name == CARD else name
        if not (stage / target).is_file():
            faults.append(f"{target}: missing")
        elif (stage / target).read_bytes() != (source / name).read_bytes():
            faults.append(f"{target}: differs from the original's {name}")
    return check_of("side files", faults, f"{len(wanted)} files equal the original's, byte by byte")


@torch.inference_mode()
def compare_outputs(model: PreTrainedModel, path: Path, kind: str) -> Outputs:
    """The folder's outputs against the measured ones, window by window."""
    finite, tokens, count = True, 0, 0
    divergence, difference = 0.0, 0.0
    lowest, highest = float("inf"), float("-inf")
    decoder = kind == "decoder"
    for inputs, measured in read_cases(path):
        found = proof_inputs.outputs(model, inputs, kind)  # [T, V]
        finite = finite and bool(found.isfinite().all() and measured.isfinite().all())
        difference = max(difference, float((found - measured).abs().max()))
        lowest, highest = min(lowest, float(measured.min())), max(highest, float(measured.max()))
        if decoder:
            some = (slice(start, start + _ROWS) for start in range(0, len(found), _ROWS))  # 70 bytes for each number
            divergence += sum(float(token_kl(measured[rows], found[rows]).sum()) for rows in some)
        tokens += len(measured)
        count += 1
    span = (highest - lowest) or 1.0
    kl_mean = divergence / tokens if decoder else None
    return Outputs(finite, kl_mean, difference / span, span, count, tokens)


def check_outputs(outputs: Outputs) -> ProofCheck:
    faults = []
    if not outputs.finite:
        faults.append("outputs are not finite")
    # Written so that NaN fails.
    if outputs.kl_mean is not None and not outputs.kl_mean <= KL_LIMIT:
        faults.append(f"mean KL {outputs.kl_mean:.3g} nats, allowed {KL_LIMIT:g}")
    if not outputs.difference <= DIFFERENCE_LIMIT:
        faults.append(f"largest difference {outputs.difference:.3g} of the range, allowed {DIFFERENCE_LIMIT:g}")
    divergence = "" if outputs.kl_mean is None else f"mean KL {outputs.kl_mean:.3g} nats, "
    where = f"on {outputs.tokens} tokens in {outputs.windows} windows"
    return check_of("outputs", faults, f"{divergence}largest difference {outputs.difference:.3g} of the range {where}")


def check_weights(model: PreTrainedModel, weight_sha256: Mapping[str, str], stage: Path) -> ProofCheck:
    """Weights of the loaded model, as float32 [out, in], against our hashes.

    Experts may be rounded by stock loading, see `Reader.as_loaded`: then they must be exactly that.
    """
    modules = dict(model.named_modules())
    entry = ARCHITECTURES.get(model.config.model_type)
    experts = None if entry is None else entry.experts
    reader = None if experts is None else Reader(stage)
    find, faults = module_finder(model), []
    for name, expected in weight_sha256.items():
        module = modules.get(find(name) or "")
        weight = _weight(module)
        if weight is None and experts is not None and reader is not None:
            weight = expert_weight(modules, name, experts)
            if weight is not None and torch.equal(weight.float(), reader.as_loaded(name)):
                weight = reader.quantized(name).dequantize(torch.float32)
        if not isinstance(weight, torch.Tensor):
            faults.append(f"{name}: the loaded model has no such weight")
        elif _sha256(weight.T if isinstance(module, Conv1D) else weight) != expected:
            faults.append(f"{name}: the weight differs from ours")
    return check_of("weights", faults, f"{len(weight_sha256)} weights equal ours, bit for bit")


def check_shapes(model: PreTrainedModel, planned: list[dict[str, Any]], *, every: bool) -> ProofCheck:
    """Parameters of the loaded model against the plan: one that loads with other shapes is another model.

    Args:
        every: no parameter may be without a planned tensor; stock classes of experts have some that several make up.
    """
    find, parameters = module_finder(model), dict(model.named_parameters())
    wanted: dict[str, list[int]] = {}
    for name, (_, shape) in (item for shard in planned for item in shard["tensors"].items()):
        module, _, last = name.rpartition(".")
        wanted[f"{find(module) or module}.{_OLD_NAMES.get(last, last)}"] = shape
    faults = [
        f"{name}: planned {wanted[name]}, the loaded model has {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in wanted and list(parameter.shape) != wanted[name]
    ]
    lacking = [name for name in parameters if name not in wanted and not name.startswith("pooler.")] if every else []
    faults += [f"{name}: the loaded model has it, the plan has not" for name in lacking]
    alike = len(parameters.keys() & wanted.keys())
    return check_of("shapes", faults, f"{alike} parameters of the loaded model have the planned shapes")


def check_cache(model: PreTrainedModel, ids: torch.Tensor, span: float) -> ProofCheck:
    """Greedy decoding with and without cache; they may part where the two best tokens are as good as tied.

    The inputs of W8A8, FP8 and LLM.int8 layers are not rounded here. A rounding step turns the last-bit differences
    between a cached and an uncached matrix product, which any right model has, into steps of 1/127: on a model of 30
    layers they moved logits by more than 1e-3 of the range.
    """
    bitsandbytes.unrounded(model)
    for module in model.modules():
        setattr(module, "quantization_enabled", False)  # noqa: B010 - compressed-tensors' own switch, unknown to types
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2 * NEW_TOKENS
    prompt = ids[: max(1, min(NEW_TOKENS, limit - NEW_TOKENS))].unsqueeze(0)
    steps = min(NEW_TOKENS, limit - prompt.shape[1])
    plain, logits = greedy(model, prompt, steps, use_cache=False)
    cached, _ = greedy(model, prompt, steps, use_cache=True)
    parting = next((step for step in range(steps) if plain[step] != cached[step]), None)
    if parting is None:
        return ProofCheck("cache", True, f"{steps} greedy tokens are the same with and without cache")
    best, second = logits[parting].topk(2).values.tolist()
    gap = (best - second) / span
    detail = f"greedy decoding parts at token {parting + 1} of {steps}, where the gap is {gap:.3g} of the range"
    return ProofCheck("cache", gap < DIFFERENCE_LIMIT, detail)


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, prompt: torch.Tensor, steps: int, *, use_cache: bool
) -> tuple[list[int], list[torch.Tensor]]:
    """The `steps` likeliest tokens after prompt [1, T], one by one, and the logits [V] each came from."""
    ids, inputs = prompt, prompt
    # transformers 5 renames the argument; both names are in use within the range that compress supports.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    memory = {argument: DynamicCache(config=model.config.get_text_config())} if use_cache else {}
    tokens, logits = [], []
    for _ in range(steps):
        output = model(input_ids=inputs if use_cache else ids, use_cache=use_cache, **memory)
        last = output.logits[0, -1]  # [V]
        inputs = last.argmax().reshape(1, 1)
        ids = torch.cat([ids, inputs], dim=1)
        tokens.append(int(inputs))
        logits.append(last)
    return tokens, logits


def check_tie(model: PreTrainedModel) -> ProofCheck:
    """Tied weights must be one tensor, not two equal ones."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    broken = [name for name, other in ties.items() if parameters.get(name) is not parameters.get(other)]
    if not ties:
        return ProofCheck("tie", True, "config.json ties no embeddings")
    names = ", ".join(sorted({*ties, *ties.values()}))
    return check_of("tie", [f"{name} is broken away" for name in broken], f"one tensor: {names}")


def _weight(module: torch.nn.Module | None) -> torch.Tensor | None:
    """What a module multiplies with: its weight, or what a quantized layer of bitsandbytes makes of it."""
    dense = None if module is None else bitsandbytes.dequantized(module)
    return getattr(module, "weight", None) if dense is None else dense


def _form(entry: list[Any] | None) -> str:
    return "nothing" if entry is None else f"{entry[0]} {entry[1]}"


def _cast(plain: Checkpoint) -> str | None:
    """The dtype of all floating tensors of a plain folder, if it is one that folders are cast to."""
    floating = {info.dtype for info in plain.tensors.values()} & {"F64", "F32", "BF16", "F16"}
    return {"F16": "float16", "BF16": "bfloat16"}.get(floating.pop()) if len(floating) == 1 else None


def _json(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], sort_keys=True) if key in config else "nothing"


def _sha256(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.detach().float().contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
