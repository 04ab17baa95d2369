"""The walk through a model, block by block, on the outputs of the blocks that are already quantized.

All calibration windows stand in front of a group of layers with a common input; the group's statistics are taken, its
layers are quantized, and the windows go on through what the codes stand for. So a layer is fitted to the inputs that
it will see in the quantized model, and every token passes every layer once. A second stream of the same windows goes
through the original weights in step, where errors of earlier layers are to be corrected (`gptq`) or a block is to
learn the original's output (`refine`). Where the stopped windows would not fit into memory, a few at a time come anew
to every group: the same result to the bit, for more passes.

Windows are computed one by one, whatever the number that is on the way together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from threadpoolctl import threadpool_limits

from compress.journal import Resumed, SavePart
from compress.model.anatomy import Anatomy
from compress.model.blocks import BlockModel
from compress.model.checkpoint import Checkpoint
from compress.model.folding import producers
from compress.model.heap import trim_heap
from compress.model.streams import first_streams
from compress.progress import Progress, Share
from compress.quantize.block import WalkSettings, opened_block
from compress.quantize.layer import LayerPlan
from compress.quantize.row_blocks import round_layer
from compress.records import LayerRecord


def quantize_nearest_all(
    checkpoint: Checkpoint,
    plans: Sequence[LayerPlan],
    save: SavePart,
    progress: Progress,
    device: str,
    resumed: Resumed | None = None,
) -> list[LayerRecord]:
    """Round-to-nearest of every planned layer, one weight in memory at a time; no calibration."""
    records = list(resumed.records) if resumed else []
    done = set(resumed.parts) if resumed else set()
    with progress.phase("Rounding", len(plans)) as advance:
        for plan in plans:
            if plan.layer.name not in done:
                quantized, new = round_layer(checkpoint, plan, device)
                save(plan.layer.name, {plan.layer.name: quantized}, [new], {}, None)
                records.append(new)
            advance(1)
    return records


def quantize_blocks(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    plans: Sequence[LayerPlan],
    windows: Sequence[torch.Tensor],
    settings: WalkSettings,
    save: SavePart,
    progress: Progress,
    resumed: Resumed | None = None,
) -> list[LayerRecord]:
    """Quantizes the planned layers on calibration windows (ids, int64 [T]), after the blocks that are `resumed`."""
    model = BlockModel(checkpoint, anatomy, dtype=settings.compute_dtype, device=settings.device)
    by_block: dict[int, list[LayerPlan]] = {}
    for plan in plans:
        by_block.setdefault(plan.layer.block, []).append(plan)
    last = max(by_block)
    sources = producers(checkpoint, anatomy, {plan.layer.name for plan in plans})
    two = settings.two_streams and any(plan.algorithm == "gptq" for plan in plans)
    streams = first_streams(model.inputs, windows, two=two, spill=settings.spill)
    model.drop_outside()
    first, records = 0, list[LayerRecord]()
    if resumed is not None:
        first, records = len(resumed.parts), list(resumed.records)
        streams.restore(resumed.state)
    with (
        torch.no_grad(),
        threadpool_limits(limits=torch.get_num_threads(), user_api="blas"),
        progress.phase("Quantizing blocks", float(last + 1)) as advance,
    ):
        advance(first)
        for index in range(first, last + 1):
            block_plans = by_block.get(index, [])
            share = Share(advance, len(windows) * (1 + len({plan.layer.fused for plan in block_plans})))
            with opened_block(model, checkpoint, anatomy, sources, index, block_plans, settings, streams) as work:
                work.run(share)
            new = list(work.records.values())
            state = streams.state() if index < last else None
            save(f"block-{index:05d}", work.weights, new, work.replaced, state)
            records += new
            del work  # its weights and statistics go before the next block's come
            trim_heap()
            share.finish()
    return records
