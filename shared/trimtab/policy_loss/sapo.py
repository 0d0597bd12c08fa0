"""SAPO: a soft gate in place of the clip."""

import torch
from torch import Tensor

from trimtab.metrics import Metrics, mean_metric, spread_metrics, token_counts
from trimtab.policy_loss.inputs import read_inputs
from trimtab.tensors import exp_tangent, select


def sapo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    r"""The softly gated policy loss of each token, before aggregation.

    .. math:: l_t = -\frac{4}{\tau} \sigma\bigl(\tau (r_t - 1)\bigr) A_t \qquad
        \tau = \tau_{positive} \text{ where } A_t > 0, \text{ else } \tau_{negative}

    On policy the gradient is that of REINFORCE; it fades on both sides of 1, above 1 until the gate rounds to 1.

    Paper: Gao et al. 2025 (https://arxiv.org/abs/2511.20347), 1.0 and 1.05 [S]. Differs: nothing. The paper averages
    by seq-mean-token-mean.

    Args:
        log_prob: (B, T) current policy; carries the gradient.
        old_log_prob: (B, T) the trainer's recompute before the update; constant.
        advantages: (B, T) or (B,); constant.
        response_mask: (B, T), 1 = the loss may use this token.
        tau_positive: steepness of the gate where A > 0; above 0.
        tau_negative: steepness of the gate elsewhere; above 0.

    Returns:
        per_token_loss: (B, T); 0 at masked tokens and where an input is not finite.
        metrics: `ratio/*`; `gate/mean`: the gradient's share of its on-policy size, per token.

    Raises:
        ValueError: a steepness that is not above 0, or a shape differs.

    Example:
        >>> sapo(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([3.0]), torch.ones(1, 1))[0]
        tensor([[-6.]])
    """
    for name, steepness in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not steepness > 0:
            raise ValueError(f"{name}: {steepness} is a steepness; above 0")
    live, _, log_r, advantage = read_inputs(log_prob, old_log_prob, advantages, response_mask)
    ratio = exp_tangent(log_r)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantage > 0, tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1))
    loss = -4 / tau * gate * advantage
    slope = ratio * 4 * gate * (1 - gate)
    metrics = spread_metrics("ratio", ratio, live) | mean_metric("gate", slope, live)
    return select(loss, live, loss.dtype), metrics | token_counts(response_mask, live)
