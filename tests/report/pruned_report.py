"""Reports of runs that prune, made by hand, for the tests of every renderer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sample_report import around, latency, layer_records, paired, sample_report, task_figures, task_record

from compress.records import LayerRecord, Measurement, StepRecord
from compress.report.build import step_part
from compress.report.remarks import remarks
from compress.report.schema import Report

BEFORE = {"ffn": 1536, "heads": 9, "kv_heads": 3, "layers": 30}
AFTER = {"ffn": 1152, "heads": 6, "kv_heads": 2, "layers": 28}
REMOVED = (20, 21)
SEARCHED = (AFTER, {**AFTER, "ffn": 1024, "layers": 30}, {**BEFORE, "layers": 22})
CALIBRATION = {"source": "default", "samples": 64, "length": 512, "tokens_used": 32768}


def pruned_report(*, quantized: bool = False, searched: bool = False, gates: tuple[str, ...] = ()) -> Report:
    """Of one prune step, or of one in front of a quantize step."""
    measurements = [*figures(quantized), *latency(), *task_figures("next_sentence")]
    report = sample_report(measurements, gates, tasks=[task_record()])
    steps = [prune_step(searched), *([quantize_step()] if quantized else [])]
    told = remarks(report.measurements, steps, format_name="safetensors", proved=True)
    return report.model_copy(update={"steps": tuple(map(step_part, steps)), "remarks": told})


def figures(quantized: bool) -> list[Measurement]:
    return [
        Measurement("size", "original", 269.060552, 1),
        Measurement("size", "result", 71.8 if quantized else 204.472296, 1),
        Measurement("size.ratio", "result/original", 0.267 if quantized else 204.472296 / 269.060552),
        Measurement("parameters", "original", 134515008),
        Measurement("parameters", "result", 102221376),
        Measurement("kv_bytes", "original", 23040),
        Measurement("kv_bytes", "result", 14336),
        Measurement("bits_per_weight", "result", 4.25 if quantized else None, note="no layer is quantized"),
        around("perplexity", "original", 18.4177, 0.031),
        around("perplexity", "result", 29.6034, 0.032),
        paired("perplexity.ratio", 1.6073, 1.58, 1.63),
        paired("kl.mean", 0.4812, 0.4611, 0.5012),
    ]


def prune_step(searched: bool = False, **settings: Any) -> StepRecord:
    used = {
        "keep": {"ffn": 0.75, "kv_heads": 2, "layers": 28},
        "importance": "obs",
        "compensate": True,
        "before": BEFORE,
        "after": AFTER,
        "layers_kept": [index for index in range(30) if index not in REMOVED],
    }
    if searched:
        used |= {"search": [row(shape, i) for i, shape in enumerate(SEARCHED)], "search_metric": "kl"}
    notes = ("tensor parallelism: 6 query heads go over 2, 3 or 6 GPUs",)
    return StepRecord("prune", used | settings, tuple(pruned_layers()), CALIBRATION, notes)


def row(shape: dict[str, int], index: int) -> dict[str, Any]:
    return {**shape, "parameters": 102221376 + index, "bytes": 204472296, "divergence": 0.512 + 0.1 * index}


def pruned_layers() -> list[LayerRecord]:
    records = []
    for block in range(30):
        name = f"model.layers.{block}"
        if block in REMOVED:
            records.append(LayerRecord(name, (), skipped="removed"))
            continue
        records.append(projection(f"{name}.self_attn.o_proj", (576, 384), "kv_heads", 3, (0, 2), 0.002 * block))
        records.append(projection(f"{name}.mlp.down_proj", (576, 1152), "ffn", 1536, range(0, 1152), 0.004 * block))
    return records


def projection(name: str, shape: tuple[int, ...], unit: str, of: int, kept: Any, more: float) -> LayerRecord:
    found = {"unit": unit, "of": of, "kept": list(kept), "ridge": 1e-2, "error_masked": 0.3 + more}
    found |= {"error_predicted": 0.1 + more, "error_measured": 0.11 + more}
    return LayerRecord(name, shape, tokens=32768, pruning=found)


def quantize_step() -> StepRecord:
    names = {record.name for record in pruned_layers()}
    kept = [layer for layer in layer_records(28) if layer.name not in names or layer.target]
    layers = [replace(layer, error_after=0.2) if "down_proj" in layer.name else layer for layer in kept]
    settings = {"target": "int4", "algorithm": "gptq", "format": "compressed-tensors", "group_size": 64}
    return StepRecord("quantize", settings, tuple(layers), CALIBRATION)
