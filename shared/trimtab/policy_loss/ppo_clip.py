"""The clipped surrogate of PPO, with separate bounds (DAPO's clip-higher) and an optional dual clip."""

import torch
from torch import Tensor

from trimtab.metrics import Metrics, mean_metric, spread_metrics, token_counts
from trimtab.ratios import log_ratio
from trimtab.tensors import check_rows, exp_tangent, expand_advantages, float_dtype, live_tokens, select


def ppo_clip(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    r"""The clipped policy loss of each token, before aggregation.

    .. math:: l_t = -\min\bigl(r_t A_t,\; \mathrm{clip}(r_t, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_t\bigr)

    With `dual_clip` c, a token with A < 0 costs at most :math:`-c A_t`.

    Paper: PPO, Schulman et al. 2017, eq. 7 (https://arxiv.org/abs/1707.06347); separate bounds, DAPO, eq. 8
    (https://arxiv.org/abs/2503.14476), 0.2 and 0.28; dual clip, Ye et al. 2020, eq. 5
    (https://arxiv.org/abs/1912.09729). Differs: beyond +20 nats the ratio continues as its tangent, so that a far
    token with A < 0 is still pulled back. The defaults are PPO's 0.2 [S]; verl clips dually at 3.0 by default, we do
    not.

    Args:
        log_prob: (B, T) current policy; carries the gradient.
        old_log_prob: (B, T) the trainer's recompute before the update; constant.
        advantages: (B, T) or (B,); constant.
        response_mask: (B, T), 1 = the loss may use this token.
        clip_low: distance from 1 below; 0 to 1.
        clip_high: distance from 1 above; 0 or more.
        dual_clip: bound of the ratio where A < 0; above 1. None: no bound.

    Returns:
        per_token_loss: (B, T); 0 at masked tokens and where an input is not finite.
        metrics: `ratio/*`; `clip/mean`, `clip_low/mean`, `clip_high/mean`: shares of live tokens whose gradient the
            clip stops; `dual_clip/mean` where it is set.

    Raises:
        ValueError: a bound out of range, or a shape differs.

    Example:
        >>> new, old = torch.tensor([[0.4, -0.1]]), torch.zeros(1, 2)
        >>> loss, metrics = ppo_clip(new, old, torch.tensor([2.0]), torch.ones(1, 2), clip_high=0.28)
        >>> loss, metrics["clip_high/mean"]
        (tensor([[-2.5600, -1.8097]]), tensor(0.5000))
    """
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low: {clip_low} is a distance from 1; between 0 and 1")
    if not clip_high >= 0:
        raise ValueError(f"clip_high: {clip_high} is a distance from 1; 0 or more")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip: {dual_clip} bounds a ratio; above 1, or None")
    check_rows(response_mask, log_prob=log_prob, old_log_prob=old_log_prob)
    raw_advantages = expand_advantages(advantages, response_mask)
    live = live_tokens(response_mask, log_prob, old_log_prob, raw_advantages)
    dtype = float_dtype(log_prob, old_log_prob, raw_advantages)
    log_r = log_ratio(log_prob, old_log_prob.detach(), live).to(dtype)
    advantage = select(raw_advantages, live, dtype)
    ratio = exp_tangent(log_r)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * advantage, -clipped * advantage)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    high = (advantage > 0) & (ratio > 1 + clip_high)
    metrics = spread_metrics("ratio", ratio, live)
    if dual_clip is not None:
        far = (advantage < 0) & (ratio > dual_clip)
        loss = torch.where(far, -dual_clip * advantage, loss)
        metrics |= mean_metric("dual_clip", far, live)
    metrics |= mean_metric("clip_low", low, live) | mean_metric("clip_high", high, live)
    metrics |= mean_metric("clip", low | high, live) | token_counts(response_mask, live)
    return select(loss, live, loss.dtype), metrics
