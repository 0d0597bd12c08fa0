"""GSPO: one ratio and one clip for the whole answer; and its form with an advantage for each token."""

import torch
from torch import Tensor

from trimtab.metrics import Metrics
from trimtab.policy_loss.clipping import check_clip, clipped_loss
from trimtab.policy_loss.inputs import read_inputs, row_mean
from trimtab.tensors import exp_tangent


def gspo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Metrics]:
    r"""The clipped loss of each answer by its sequence ratio, on each of its tokens, before aggregation.

    .. math:: s_i = \exp\Bigl(\tfrac{1}{|y_i|} \sum_t \log r_{i,t}\Bigr) \qquad
        l_i = -\min\bigl(s_i A_i,\; \mathrm{clip}(s_i, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_i\bigr)

    Paper: Zheng et al. 2025, eq. 5 and 7 (https://arxiv.org/abs/2507.18071), 3e-4 and 4e-4 [P]. Differs: beyond +20
    nats the ratio continues as its tangent. Aggregate by seq-mean-token-mean, which takes each row's loss once; veRL's
    `gspo` is the token form below, with bounds of 0.2 unless they are set.

    Args:
        log_prob: (B, T) current policy; carries the gradient.
        old_log_prob: (B, T) the trainer's recompute before the update; constant.
        advantages: (B, T) or (B,); the mean over the row's live tokens is used.
        response_mask: (B, T), 1 = the loss may use this token.
        clip_low: distance from 1 below; 0 to 1.
        clip_high: distance from 1 above; 0 or more.

    Returns:
        per_token_loss: (B, T), the row's loss on each live token; 0 elsewhere.
        metrics: `ratio/*` of the sequence; `clip/mean`, `clip_low/mean`, `clip_high/mean` as shares of tokens.

    Raises:
        ValueError: a bound out of range, or a shape differs.

    Example:
        >>> new, old = torch.tensor([[0.4, -0.1]]), torch.zeros(1, 2)
        >>> gspo(new, old, torch.tensor([2.0]), torch.ones(1, 2), clip_high=0.1)[0]
        tensor([[-2.2000, -2.2000]])
    """
    check_clip(clip_low, clip_high)
    inputs = read_inputs(log_prob, old_log_prob, advantages, response_mask)
    inputs = inputs._replace(advantage=row_mean(inputs.advantage, inputs.live))
    ratio = exp_tangent(row_mean(inputs.log_ratio, inputs.live))
    return clipped_loss(ratio, inputs, response_mask, clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Metrics]:
    r"""GSPO with an advantage for each token: the value of the sequence ratio, the gradient of the token's own.

    .. math:: s_{i,t} = \mathrm{sg}[s_i] \frac{\pi_\theta(y_{i,t})}{\mathrm{sg}[\pi_\theta(y_{i,t})]} \qquad
        l_{i,t} = -\min\bigl(s_{i,t} A_{i,t},\; \mathrm{clip}(s_{i,t}, 1 - \epsilon_{low}, 1 + \epsilon_{high})
        A_{i,t}\bigr)

    Paper: Zheng et al. 2025, eq. 13 and 14 (https://arxiv.org/abs/2507.18071), 3e-4 and 4e-4 [P]. Differs: beyond
    +20 nats the detached ratio continues as its tangent. With one advantage an answer, loss and gradient are those of
    `gspo` under seq-mean-token-mean.

    Args:
        log_prob: (B, T) current policy; carries the gradient.
        old_log_prob: (B, T) the trainer's recompute before the update; constant.
        advantages: (B, T) or (B,); constant.
        response_mask: (B, T), 1 = the loss may use this token.
        clip_low: distance from 1 below; 0 to 1.
        clip_high: distance from 1 above; 0 or more.

    Returns:
        per_token_loss: (B, T); 0 at masked and removed tokens.
        metrics: as those of `gspo`.

    Raises:
        ValueError: a bound out of range, or a shape differs.

    Example:
        >>> new, old = torch.tensor([[0.4, -0.2]]), torch.zeros(1, 2)
        >>> gspo_token(new, old, torch.tensor([[2.0, 1.0]]), torch.ones(1, 2), clip_high=0.2)[0]
        tensor([[-2.2103, -1.1052]])
    """
    check_clip(clip_low, clip_high)
    inputs = read_inputs(log_prob, old_log_prob, advantages, response_mask)
    sequence = exp_tangent(row_mean(inputs.log_ratio, inputs.live)).detach()
    ratio = sequence * torch.exp(inputs.log_prob - inputs.log_prob.detach())
    return clipped_loss(ratio, inputs, response_mask, clip_low=clip_low, clip_high=clip_high)
