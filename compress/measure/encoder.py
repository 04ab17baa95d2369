"""How close an encoder's text embeddings stayed to the original's.

An embedding is what sentence-transformers would compute: token states, pooled as 1_Pooling/config.json says
(without one: the mean over the attention mask), normalized if modules.json lists Normalize. Only texts of one length
share a batch, so nothing is padded and the mask is all ones; both models get the same batches.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compress.errors import BrokenResultError, UsageError
from compress.measure.fidelity import not_finite_hint, percentile_measurement
from compress.measure.floor import DTYPES, in_bfloat16
from compress.measure.similarity import Similarities, pair_cosines, similarity_measurement
from compress.measure.statistics import block_mean, block_quantile
from compress.records import FLOOR, ORIGINAL, PAIRED, RESULT, Measurement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.data.windows import Windows
    from compress.progress import Advance, Progress

BATCH_TOKENS = 2048
"""Tokens of one batch at most: more are no faster on a CPU."""
COMPARED_PAIRWISE = 64
"""Texts whose similarities to each other are compared: 2,016 pairs."""


def _weighted_mean(states: Tensor) -> Tensor:
    """Mean of states [.., n, d] with weights 1..n (sentence-transformers' weightedmean)."""
    weights = torch.arange(1, states.shape[-2] + 1, dtype=states.dtype, device=states.device)
    return (weights.unsqueeze(-1) * states).sum(dim=-2) / weights.sum()


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda states: states[..., 0, :],
    "mean": lambda states: states.mean(dim=-2),
    "max": lambda states: states.amax(dim=-2),
    "mean_sqrt_len": lambda states: states.sum(dim=-2) / states.shape[-2] ** 0.5,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda states: states[..., -1, :],
}
"""States [.., n, d] of unpadded texts -> embeddings [.., d], by the names of sentence-transformers' configs."""


@dataclass(frozen=True)
class Pooling:
    """How token states become one embedding; several modes are concatenated in the order of POOLINGS."""

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False


@dataclass(frozen=True)
class EncoderTexts:
    """The two models' embeddings compared.

    Attributes:
        cosine: of the two embeddings of each text, float64 [N].
        similarities: among the first COMPARED_PAIRWISE texts.
    """

    cosine: npt.NDArray[np.float64]
    similarities: Similarities

    def rows(self) -> list[dict[str, Any]]:
        """One row of plain data per text and per pair, nothing rounded, for the raw file in the report folder."""
        texts = [
            {"kind": "embedding", "text": text, "cosine": value} for text, value in enumerate(self.cosine.tolist())
        ]
        return [*texts, *self.similarities.rows()]


@dataclass(frozen=True)
class EncoderFloor:
    """The original in bfloat16 against itself in float32; `cosine` [N] is None where it cannot run so (see `note`)."""

    cosine: npt.NDArray[np.float64] | None
    note: str | None = None

    def rows(self) -> list[dict[str, Any]]:
        values = [] if self.cosine is None else self.cosine.tolist()
        return [
            {"kind": "floor", "text": text, "cosine": value, "comparison": DTYPES} for text, value in enumerate(values)
        ]


def read_pooling(folder: Path) -> Pooling:
    """The pooling of a sentence-transformers folder; the mean for a plain encoder.

    Raises:
        UsageError: the config asks for a pooling that is not in POOLINGS, or for none.
    """
    modules = _read_json(folder / "modules.json", [])
    normalize = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
    config_file = folder / "1_Pooling" / "config.json"
    if not config_file.exists():
        return Pooling(normalize=normalize)
    config = _read_json(config_file, {})
    if isinstance(named := config.get("pooling_mode"), str):
        asked = {named}
    else:
        asked = {
            key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
            for key, value in config.items()
            if key.startswith("pooling_mode_") and value is True
        }
    if not asked or not asked <= POOLINGS.keys():
        raise UsageError(
            f"{config_file}: pooling {', '.join(sorted(asked)) or 'none'} is not known",
            hint=f"known poolings: {', '.join(POOLINGS)}",
        )
    return Pooling(tuple(mode for mode in POOLINGS if mode in asked), normalize)


def longest_text(folder: Path) -> int | None:
    """Tokens that sentence-transformers cuts a text to (`max_seq_length`); None where the folder does not say."""
    stated = _read_json(folder / "sentence_bert_config.json", {}).get("max_seq_length")
    return stated if isinstance(stated, int) else None


def embed(
    forward: Callable[..., Any], ids: Sequence[Tensor], pooling: Pooling, device: torch.device, advance: Advance
) -> Tensor:
    """Embeddings, float64 [N, d] on the CPU, of texts with ids [n_i] each.

    Args:
        forward: the base model, or what answers as it does.
        advance: is told of every text.
    """
    found: dict[int, Tensor] = {}
    for texts in _batches(ids):
        batch = torch.stack([ids[text] for text in texts]).to(device)  # [b, n]
        states = forward(input_ids=batch, attention_mask=torch.ones_like(batch)).last_hidden_state
        wide = states.cpu().double()  # [b, n, d]
        pooled = torch.cat([POOLINGS[mode](wide) for mode in pooling.modes], dim=-1)  # [b, d]
        if pooling.normalize:
            pooled = pooled / pooled.norm(dim=-1, keepdim=True)
        found.update(zip(texts, pooled, strict=True))
        advance(len(texts))
    return torch.stack([found[text] for text in range(len(ids))])


def unit_embeddings(
    model: PreTrainedModel, ids: Sequence[Tensor], pooling: Pooling, name: str, advance: Advance
) -> Tensor:
    """As `embed`, of length 1 each: their products are cosines.

    Raises:
        BrokenResultError: an embedding of the model `name` is not finite, or zero.
    """
    embeddings = embed(model.base_model, ids, pooling, model.device, advance)
    lengths = embeddings.norm(dim=-1, keepdim=True)
    broken = ~(lengths.isfinite() & (lengths > 0)).squeeze(-1)  # [N]
    if bool(broken.any()):
        window = int(broken.nonzero()[0])
        raise BrokenResultError(
            f"the embedding of the {name} model is not finite, or zero, in window {window}",
            hint=not_finite_hint(name),
        )
    units: Tensor = embeddings / lengths
    return units


def compare_embeddings(
    original: PreTrainedModel,
    result: PreTrainedModel,
    windows: Windows,
    pooling: Pooling,
    progress: Progress,
) -> EncoderTexts:
    """Embeds every window with both models and compares.

    Raises:
        BrokenResultError: an embedding is not finite or zero, or the widths differ.
        UsageError: there is no text.
    """
    if not windows.ids:
        raise UsageError("there is no text to compare embeddings on", hint="use longer evaluation text")
    with torch.inference_mode(), progress.phase("fidelity", 2 * len(windows.ids)) as advance:
        first = unit_embeddings(original, windows.ids, pooling, ORIGINAL, advance)
        second = unit_embeddings(result, windows.ids, pooling, RESULT, advance)
        check_widths(first, second)
        pairs = (pair_cosines(units[:COMPARED_PAIRWISE].numpy()) for units in (first, second))
        return EncoderTexts(_cosines(first, second), Similarities(*pairs))


def encoder_floor(original: PreTrainedModel, windows: Windows, pooling: Pooling, progress: Progress) -> EncoderFloor:
    """The first COMPARED_PAIRWISE texts in bfloat16 against float32, both by the original.

    Args:
        original: float32, in eval mode. Its weights are there once more, in bfloat16, while this runs.

    Raises:
        BrokenResultError: an embedding in float32 is not finite or zero.
    """
    ids = windows.ids[:COMPARED_PAIRWISE]
    with torch.inference_mode(), progress.phase("noise floor", 2 * len(ids)) as advance:
        wide = unit_embeddings(original, ids, pooling, ORIGINAL, advance)
        try:
            narrow = embed(in_bfloat16(original.base_model), ids, pooling, original.device, advance)
        except RuntimeError as error:  # a device or an operation without bfloat16
            reason = str(error).partition("\n")[0]
            return EncoderFloor(None, f"the original does not run in bfloat16 here: {reason}")
    lengths = narrow.norm(dim=-1, keepdim=True)
    if not bool((lengths.isfinite() & (lengths > 0)).all()):
        return EncoderFloor(None, "the original's embeddings are not finite in bfloat16")
    return EncoderFloor(_cosines(wide, narrow / lengths))


def encoder_measurements(
    texts: EncoderTexts,
    *,
    levels: Sequence[float] = (),
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """cosine.mean, cosine.p5 and similarity.spearman with 95 % bootstrap intervals over texts.

    Args:
        levels: one-sided confidence levels that gates ask for; 0.95 is always added.
        seed: of the resampling; each metric starts from it anew.
    """
    wanted, facts = tuple(sorted({0.95, *levels})), dict(conditions or {})
    return [
        *_cosine_measurements(texts.cosine, wanted, seed, facts),
        similarity_measurement(texts.similarities, levels=wanted, seed=seed, conditions=facts),
    ]


def encoder_floor_measurements(
    floor: EncoderFloor,
    *,
    levels: Sequence[float] = (),
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """cosine.mean and cosine.p5 with the subject "original/original"; conditions["comparison"] says what differs."""
    facts = dict(conditions or {}) | {"comparison": DTYPES}
    if floor.cosine is None:
        return [Measurement("cosine.mean", FLOOR, None, conditions=facts, note=floor.note)]
    wanted = tuple(sorted({0.95, *levels}))
    return [replace(one, subject=FLOOR) for one in _cosine_measurements(floor.cosine, wanted, seed, facts)]


def check_widths(first: Tensor, second: Tensor) -> None:
    """Raises BrokenResultError where two sets of embeddings have different dimensions."""
    if first.shape != second.shape:
        raise BrokenResultError(f"the embeddings have {first.shape[-1]} and {second.shape[-1]} dimensions")


def _cosine_measurements(
    cosine: npt.NDArray[np.float64], levels: Sequence[float], seed: int, facts: Mapping[str, Any]
) -> list[Measurement]:
    count = len(cosine)
    blocks = np.arange(count)

    def options() -> dict[str, Any]:
        return {"rng": np.random.default_rng(seed), "levels": levels, "blocks_are": f"{count} texts"}

    mean = block_mean(cosine, blocks, **options())
    return [
        Measurement("cosine.mean", PAIRED, mean.value, count, mean.interval, mean.one_sided, facts),
        percentile_measurement(
            "cosine.p5", PAIRED, 0.05, count, facts, lambda: block_quantile(cosine, 0.05, blocks, **options())
        ),
    ]


def _cosines(a: Tensor, b: Tensor) -> npt.NDArray[np.float64]:
    """Cosines [N] of unit vectors [N, d]; as 1 - |a - b|^2 / 2 they are exactly 1 for equal ones."""
    found: npt.NDArray[np.float64] = (1 - (a - b).square().sum(dim=-1) / 2).numpy()
    return found


def _batches(ids: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of texts of one length, BATCH_TOKENS together at most (but one text always)."""
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for text, one in enumerate(ids):
        alike[len(one)].append(text)
    for length, texts in sorted(alike.items()):
        size = max(1, BATCH_TOKENS // length)
        for start in range(0, len(texts), size):
            yield texts[start : start + size]


def _read_json(path: Path, default: Any) -> Any:
    if not path.exists():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
