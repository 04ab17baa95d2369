"""lm-eval's HFLM around a model in memory: one item at a time, nothing cut off, every logit finite."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import BrokenResultError, UsageError

_LISTED = 5


class WholeItems(HFLM):  # type: ignore[misc]  # lm-eval carries no annotations
    """HFLM with a batch size of 1, which makes padding and its pad token idle.

    HFLM cuts what is too long on the left and goes on; here that is an error before anything runs. A tokenizer
    without BOS and EOS is served too.

    Args:
        name: "original" or "result", for messages. ran: called after each forward pass of a request.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, ran: Callable[[], None]
    ) -> None:
        # HFLM gives a tokenizer without pad token one; the caller's stays as it is.
        super().__init__(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=1, backend="causal")
        self._name, self._ran = name, ran

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        if self.prefix_token_id is None and add_special_tokens is None:
            ids: list[int] = self.tokenizer.encode(string)
            return ids
        found: list[int] = super().tok_encode(string, add_special_tokens, **options)
        return found

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
        return None if tokens is None else super().tok_decode(tokens, skip_special_tokens)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        if self.prefix_token_id is None and any(request.args[0] == "" for request in requests):
            raise UsageError(
                "the task has items without a context, and the tokenizer neither BOS nor EOS to start with"
            )
        del disable_tqdm
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None) -> Any:
        del disable_tqdm
        # The last token is predicted and never read.
        self._check_lengths([(text, len(context) + len(answer) - 1) for (text, _), context, answer in requests])
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
        del disable_tqdm
        lengths = []
        for text, options in (request.args for request in requests):
            new = next(
                (options[key] for key in ("max_gen_toks", "max_new_tokens") if key in options), self.max_gen_toks
            )
            lengths.append((text, len(self.tok_encode(text)) + int(new)))
        self._check_lengths(lengths)
        return super().generate_until(requests, disable_tqdm=True)

    def _check_lengths(self, lengths: list[tuple[str, int]]) -> None:
        longer = [(text, length) for text, length in lengths if length > self.max_length]
        if longer:
            listed = "\n".join(f"{text[:60]!r}... needs {length} positions" for text, length in longer[:_LISTED])
            raise UsageError(
                f"{len(longer)} of {len(lengths)} requests of the task are longer than the {self.max_length} positions "
                f"of the model:\n{listed}",
                hint="take fewer examples (`fewshot`), or another task",
            )

    def _model_call(self, inps: Tensor, **options: Any) -> Tensor:
        logits = self._finite(super()._model_call(inps, **options))
        self._ran()
        return logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        check = LogitsProcessorList([lambda _ids, scores: self._finite(scores)])
        found: Tensor = super()._model_generate(context, max_length, stop, logits_processor=check, **options)
        self._ran()
        return found

    def _finite(self, logits: Tensor) -> Tensor:
        if not bool(torch.isfinite(logits.sum(dim=-1)).all()):
            raise BrokenResultError(f"logits of the {self._name} model are not finite in a task of lm-eval")
        return logits
