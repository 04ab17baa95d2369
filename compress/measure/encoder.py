"""How close an encoder's text embeddings stayed to the original's.

An embedding is what sentence-transformers would compute: token states, pooled as 1_Pooling/config.json says
(without one: the mean over the attention mask), normalized if modules.json lists Normalize. Texts run one at a
time, so nothing is padded and the mask is all ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compress.errors import BrokenResultError, UsageError
from compress.measure.fidelity import ORIGINAL, PAIRED, RESULT, percentile_measurement
from compress.measure.statistics import block_mean, block_quantile
from compress.records import Measurement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.data.windows import Windows
    from compress.progress import Progress


def _weighted_mean(states: Tensor) -> Tensor:
    """Mean of states [n, d] with weights 1..n (sentence-transformers' weightedmean)."""
    weights = torch.arange(1, len(states) + 1, dtype=states.dtype, device=states.device)
    return (weights.unsqueeze(-1) * states).sum(dim=0) / weights.sum()


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(dim=0),
    "max": lambda states: states.amax(dim=0),
    "mean_sqrt_len": lambda states: states.sum(dim=0) / len(states) ** 0.5,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda states: states[-1],
}
"""States [n, d] of one unpadded text -> embedding [d], by the names of sentence-transformers' configs."""


@dataclass(frozen=True)
class Pooling:
    """How token states become one embedding; several modes are concatenated in the order of POOLINGS."""

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False


@dataclass(frozen=True)
class EncoderTexts:
    """Per text, both [N]: the cosine of the two models' embeddings (float64), and the text's length in tokens."""

    cosine: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]

    def raw(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name, for `numpy.savez` in the report folder."""
        return {"cosine": self.cosine, "tokens": self.tokens}


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


def embed(model: PreTrainedModel, ids: Tensor, pooling: Pooling) -> Tensor:
    """Embedding, float64 [d] on the CPU, of one text with ids [n]."""
    batch = ids.unsqueeze(0).to(model.device)
    states = model.base_model(input_ids=batch, attention_mask=torch.ones_like(batch)).last_hidden_state[0]
    wide = states.cpu().double()  # [n, d]
    pooled = torch.cat([POOLINGS[mode](wide) for mode in pooling.modes])
    return pooled / pooled.norm() if pooling.normalize else pooled


def compare_embeddings(
    original: PreTrainedModel,
    result: PreTrainedModel,
    windows: Windows,
    pooling: Pooling,
    progress: Progress,
) -> EncoderTexts:
    """Embeds every window with both models and takes the cosine.

    Raises:
        BrokenResultError: an embedding is not finite or zero, or the widths differ.
        UsageError: there is no text.
    """
    if not windows.ids:
        raise UsageError("there is no text to compare embeddings on", hint="use longer evaluation text")
    cosine = []
    with torch.inference_mode(), progress.phase("fidelity", len(windows.ids)) as advance:
        for index, ids in enumerate(windows.ids):
            units = []
            for model, name in ((original, ORIGINAL), (result, RESULT)):
                embedding = embed(model, ids, pooling)
                length = embedding.norm()
                if not bool(length.isfinite()) or length == 0:
                    raise BrokenResultError(
                        f"the embedding of the {name} model is not finite, or zero, in window {index}"
                    )
                units.append(embedding / length)
            cosine.append(_cosine(units[0], units[1]))
            advance(1)
    return EncoderTexts(np.array(cosine), np.array([len(ids) for ids in windows.ids]))


def encoder_measurements(
    texts: EncoderTexts,
    *,
    levels: Sequence[float] = (),
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """cosine.mean and cosine.p5 with 95 % bootstrap intervals over texts; 0.95 is always among the levels."""
    wanted = tuple(sorted({0.95, *levels}))
    count = len(texts.cosine)
    blocks = np.arange(count)
    facts = dict(conditions or {})

    def options() -> dict[str, Any]:
        return {"rng": np.random.default_rng(seed), "levels": wanted, "blocks_are": f"{count} texts"}

    mean = block_mean(texts.cosine, blocks, **options())
    return [
        Measurement("cosine.mean", PAIRED, mean.value, count, mean.interval, mean.one_sided, facts),
        percentile_measurement(
            "cosine.p5",
            PAIRED,
            0.05,
            count,
            facts,
            lambda: block_quantile(texts.cosine, 0.05, blocks, **options()),
        ),
    ]


def _cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two unit vectors [d]; as 1 - |a - b|^2 / 2 it is exactly 1 for equal ones."""
    if a.shape != b.shape:
        raise BrokenResultError(f"the embeddings have {len(a)} and {len(b)} dimensions")
    return 1 - float((a - b).square().sum()) / 2


def _read_json(path: Path, default: Any) -> Any:
    if not path.exists():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
