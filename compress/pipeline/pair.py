"""Two models side by side, and what is asked about them: by a run after its steps, by eval and bench at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from compress.model.architectures import Kind
from compress.model.checkpoint import Checkpoint
from compress.model.zero_points import loads_nowhere
from compress.output import PROVENANCE
from compress.plan.tasks import Asked, PlannedTask
from compress.progress import Progress

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Pair:
    """Attributes:
    result: None where the original alone is timed.
    parameters: weights that each of them computes with.
    ours: compress wrote the result, so that its own reader understands it.
    cast: dtype name, where the result is a cast and runs in that dtype.
    """

    original: Checkpoint
    result: Checkpoint | None
    kind: Kind
    parameters: int
    asked: Asked
    tasks: tuple[PlannedTask, ...]
    device: str
    trust_remote_code: bool
    progress: Progress
    ours: bool = False
    cast: str | None = None

    @property
    def positions(self) -> int | None:
        """Positions that both models have; None where neither says."""
        both = [one.positions for one in (self.original, self.result) if one is not None]
        return min((positions for positions in both if positions is not None), default=None)

    @property
    def levels(self) -> tuple[float, ...]:
        """One-sided confidence levels that gates ask for."""
        return tuple(sorted({gate.level for gate in self.asked.gates if gate.level is not None}))

    def load_original(self, dtype: torch.dtype) -> PreTrainedModel:
        from compress.model.load import load_original

        return load_original(self.original, dtype=dtype, device=self.device, trust_remote_code=self.trust_remote_code)

    def load_result(self, dtype: torch.dtype) -> PreTrainedModel:
        """The result on dequantized weights if compress wrote it, else as stock transformers loads it."""
        assert self.result is not None
        if self.ours:
            from compress.runtime.load import load_reference

            return load_reference(
                self.result.folder, dtype=dtype, device=self.device, trust_remote_code=self.trust_remote_code
            )
        from compress.model.load import load_original

        return load_original(self.result, dtype=dtype, device=self.device, trust_remote_code=self.trust_remote_code)


def is_ours(checkpoint: Checkpoint) -> bool:
    """Whether compress wrote the folder, so that its own reader understands it."""
    return (checkpoint.folder / PROVENANCE).is_file()


def timed_loader(pair: Pair) -> Literal["stock", "reference"]:
    """What runs the result while it is timed: stock transformers wherever it can load it by itself."""
    assert pair.result is not None
    block = pair.result.config.get("quantization_config")
    method = block.get("quant_method") if isinstance(block, dict) else None
    foreign = method == "gptq" or loads_nowhere(pair.result.config)
    return "reference" if foreign and pair.ours else "stock"
