"""The log-probs that transformers samples from, which TRL throws away."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin


class SamplerLogProbs:
    """Keeps the log-prob of each sampled token: of the distribution that was drawn from, after every processor.

    It stands last among a generation's logits processors. A token is known one call after its scores are, so that
    no more than one step's scores are held.
    """

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._scores is not None:
            self._steps.append(_pick(self._scores, input_ids[:, -1]))
        self._scores = scores.float().log_softmax(dim=-1)
        return scores

    def of(self, completions: list[list[int]]) -> list[list[float]]:
        """The log-probs of the completions, which may end before the last step."""
        if self._scores is None:
            return [[] for _ in completions]
        steps = len(self._steps) + 1
        last = torch.tensor([row[-1] if len(row) == steps else 0 for row in completions], device=self._scores.device)
        table = torch.stack([*self._steps, _pick(self._scores, last)], dim=1).tolist()
        return [values[: len(row)] for values, row in zip(table, completions, strict=True)]


@contextmanager
def recorded_log_probs() -> Iterator[SamplerLogProbs]:
    """Record what a model samples from inside the block; one generation at a time."""
    recorder, original = SamplerLogProbs(), GenerationMixin._get_logits_processor

    def with_recorder(self: Any, *args: Any, **kwargs: Any) -> Any:
        processors = original(self, *args, **kwargs)
        processors.append(recorder)
        return processors

    # On the class, since PEFT and other wrappers generate through a model of their own.
    GenerationMixin._get_logits_processor = with_recorder
    try:
        yield recorder
    finally:
        GenerationMixin._get_logits_processor = original


def _pick(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(1, tokens.to(log_probs.device).unsqueeze(1)).squeeze(1)
