"""The clip that the surrogates of the PPO family share."""

import torch
from torch import Tensor

from trimtab.metrics import Metrics, mean_metric, spread_metrics, token_counts
from trimtab.policy_loss.inputs import Inputs
from trimtab.tensors import select


def check_clip(clip_low: float, clip_high: float) -> None:
    """Distances from 1 that make an interval, or ValueError says which does not."""
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low: {clip_low} is a distance from 1; between 0 and 1")
    if not clip_high >= 0:
        raise ValueError(f"clip_high: {clip_high} is a distance from 1; 0 or more")


def clipped_loss(
    ratio: Tensor, inputs: Inputs, response_mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    r"""The pessimistic loss :math:`-\min(r A, \mathrm{clip}(r) A)`, and the shares of tokens that the clip stops.

    Args:
        ratio: (B, T) with its gradient.
        inputs: of the surrogate.
        response_mask: (B, T), for the counts.
        clip_low: distance from 1 below.
        clip_high: distance from 1 above.
    """
    live, advantage = inputs.live, inputs.advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * advantage, -clipped * advantage)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    high = (advantage > 0) & (ratio > 1 + clip_high)
    metrics = spread_metrics("ratio", ratio, live) | mean_metric("clip", low | high, live)
    metrics |= mean_metric("clip_low", low, live) | mean_metric("clip_high", high, live)
    return select(loss, live, loss.dtype), metrics | token_counts(response_mask, live)
