"""MinPRO: the token ratio times the smallest ratio before it, as a bounded weight."""

import torch
from torch import Tensor

from trimtab.metrics import Metrics
from trimtab.policy_loss.inputs import read_inputs
from trimtab.policy_loss.weighting import weighted_loss
from trimtab.ratios import log_weight


def minpro(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cap: float,
    floor: float = 0.0,
) -> tuple[Tensor, Metrics]:
    r"""The policy-gradient loss of each token, weighted by its minimum prefix ratio, before aggregation.

    .. math:: w_t = \min\bigl(1, \min_{s < t} r_s\bigr)\, r_t \qquad
        l_t = -\mathrm{sg}\bigl[\mathrm{clamp}(w_t, floor, cap)\bigr] A_t \log \pi_\theta(y_t)

    A stand-in for the product of all ratios up to t, which is the exact correction and explodes.

    Paper: Lei et al. 2026 (https://arxiv.org/abs/2601.22718). Differs: the text leaves open whether the minimum is
    capped at 1; an empty prefix counts as 1 here, which caps it. The prefix is strictly before t: with t in it the
    token's own ratio would count twice. No bounds were published [M], so `cap` has no default.

    Args:
        log_prob: (B, T) current policy; carries the gradient.
        old_log_prob: (B, T) the trainer's recompute before the update, or the stale sampler; constant.
        advantages: (B, T) or (B,); constant.
        response_mask: (B, T), 1 = the loss may use this token; the prefix runs over these.
        cap: upper bound of the weight.
        floor: lower bound of the weight; 0 is none.

    Returns:
        per_token_loss: (B, T); 0 at masked tokens and where an input is not finite.
        metrics: as those of `cispo`, of the minimum prefix ratio.

    Raises:
        ValueError: bounds that exclude each other, or a shape differs.

    Example:
        >>> ratios = torch.tensor([[0.9, 1.2, 0.5, 1.1]])
        >>> new = torch.full((1, 4), -1.0)
        >>> minpro(new, new - ratios.log(), torch.tensor([1.0]), torch.ones(1, 4), cap=5.0)[0]
        tensor([[0.9000, 1.0800, 0.4500, 0.5500]])
    """
    inputs = read_inputs(log_prob, old_log_prob, advantages, response_mask)
    ratio = inputs.log_ratio.detach()
    weight = log_weight(ratio, torch.zeros_like(ratio), inputs.live, level="prefix_min")
    return weighted_loss(weight, inputs, response_mask, cap=cap, floor=floor)
