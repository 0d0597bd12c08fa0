"""The clipped surrogate of PPO, with separate bounds (DAPO's clip-higher) and an optional dual clip."""

import torch
from torch import Tensor

from trimtab.metrics import Metrics, mean_metric
from trimtab.policy_loss.clipping import check_clip, clipped_loss
from trimtab.policy_loss.inputs import read_inputs
from trimtab.tensors import exp_tangent


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
    check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip: {dual_clip} bounds a ratio; above 1, or None")
    inputs = read_inputs(log_prob, old_log_prob, advantages, response_mask)
    ratio = exp_tangent(inputs.log_ratio)
    loss, metrics = clipped_loss(ratio, inputs, response_mask, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        far = (inputs.advantage < 0) & (ratio > dual_clip)
        loss = torch.where(far, -dual_clip * inputs.advantage, loss)
        metrics |= mean_metric("dual_clip", far, inputs.live)
    return loss, metrics
