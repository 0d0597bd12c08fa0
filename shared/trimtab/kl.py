"""Estimators of the divergence from the reference policy, one value a token."""

import torch
from torch import Tensor

from trimtab.ratios import log_ratio
from trimtab.tensors import MAX_EXPONENT, check_rows, exp_tangent, live_tokens, select

ESTIMATORS = ("k1", "k2", "k3", "unbiased")


def kl_penalty(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    estimator: str = "k3",
    old_log_prob: Tensor | None = None,
) -> Tensor:
    r"""Estimate of KL(current || reference) on each sampled token.

    .. math::
        d = \log \pi_{ref} - \log \pi_\theta \qquad
        k_1 = -d \quad k_2 = \tfrac12 d^2 \quad k_3 = e^{d} - 1 - d \quad
        \text{unbiased} = \frac{\pi_\theta}{\pi_{old}} k_3

    Paper: Schulman 2020 (http://joschu.net/blog/kl-approx.html); k3 in the loss, GRPO, eq. 4
    (https://arxiv.org/abs/2402.03300); unbiased, DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556). Differs: beyond
    d = 20 the exponential continues as its tangent, where other code overflows to inf. Note that the gradient of k3
    is that of KL(reference || current); `unbiased` and `k2` have that of KL(current || reference).

    Args:
        log_prob: (B, T) current policy; carries the gradient.
        ref_log_prob: (B, T) frozen reference; constant.
        response_mask: (B, T), 1 = the loss may use this token.
        estimator: one of `ESTIMATORS`.
        old_log_prob: (B, T) the trainer's recompute before the update; `unbiased` needs it.

    Returns:
        (B, T) in nats; 0 at masked tokens and where an input is not finite.

    Raises:
        ValueError: an unknown estimator, `unbiased` without `old_log_prob`, or a shape differs.

    Example:
        >>> kl_penalty(torch.tensor([[0.0]]), torch.tensor([[-0.5]]), torch.ones(1, 1))
        tensor([[0.1065]])
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator: {estimator!r} is unknown; one of {', '.join(ESTIMATORS)}")
    check_rows(response_mask, log_prob=log_prob, ref_log_prob=ref_log_prob)
    difference = -log_ratio(log_prob, ref_log_prob.detach(), response_mask)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    k3 = k3_estimate(difference)
    if estimator == "k3":
        return k3
    if old_log_prob is None:
        raise ValueError("estimator: unbiased needs old_log_prob, the policy that the ratio starts from")
    check_rows(response_mask, old_log_prob=old_log_prob)
    live = live_tokens(response_mask, log_prob, old_log_prob, ref_log_prob)
    log_update = log_ratio(log_prob, old_log_prob.detach(), live)
    ratio = exp_tangent(log_update).detach()
    # The gradient of ratio * k3 is -ratio * d. It is set here, for the product of two tangents would turn its sign.
    value = ratio * k3.detach() - ratio * difference.detach() * (log_update - log_update.detach())
    return select(value, live, value.dtype)


def k3_estimate(difference: Tensor) -> Tensor:
    """exp(d) - 1 - d: never negative, exact near 0, finite everywhere.

    Example:
        >>> k3_estimate(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.7183])
    """
    near = difference.clamp(max=MAX_EXPONENT)
    # expm1 keeps the digits that exp(d) - 1 loses where the policies almost agree.
    beyond = torch.exp(near) * (difference - near)
    return torch.expm1(near) + beyond - difference
