"""Importance weights: truncated (TIS) or masked (IcePop, MIS), at five levels."""

import math

import torch
from torch import Tensor

from trimtab.correction.bounds import check_bounds, inside
from trimtab.masking import masked_sum
from trimtab.metrics import Metrics, mean_metric, spread_metrics, token_counts
from trimtab.ratios import SEQUENCE_LEVELS, log_weight
from trimtab.tensors import bool_mask, check_rows, exp_clamped, live_tokens, select

BOUNDS = ("truncate", "mask")


def importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    level: str = "token",
    bound: str = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
    normalize: bool = False,
    mean: Tensor | float | None = None,
) -> tuple[Tensor, Metrics]:
    r"""Detached weight of each token for having been sampled by another policy than the one that trains.

    .. math::
        w = \exp(\ell_{level}) \qquad
        \text{truncate: } \max(\min(w, high), low) \quad
        \text{mask: } w \cdot 1[low \le w \le high]

    where :math:`\ell` is the log of old over rollout at the level (`trimtab.ratios.log_weight`).

    Paper: truncate at token level, TIS, Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl), cap 2 [C] in
    their scripts; mask at sequence_product, MIS, Liu et al. 2025 (https://richardli.xyz/rl-collapse); mask at token
    level, IcePop, Ring-1T (https://arxiv.org/abs/2510.18855), 0.5 to 5. Differs: bounds always hold for old/rollout,
    never for its inverse; a normalised weight is truncated to `high` again, where verl lets it exceed the cap.

    Args:
        old_log_prob: (B, T) the trainer's recompute before the update.
        rollout_log_prob: (B, T) what the sampler returned.
        response_mask: (B, T), 1 = the loss may use this token.
        level: one of `trimtab.ratios.LEVELS`.
        bound: truncate | mask. Bounds are inclusive, and compared in log space.
        low: lower bound on old/rollout; 0 or None is none.
        high: upper bound on old/rollout; None is none.
        normalize: divide by the mean over live tokens, or over rows at a sequence level; weights that became 0 count.
        mean: the mean of the whole optimizer step to divide by; implies `normalize`. Default: of this batch.

    Returns:
        weights: (B, T), detached; 0 at masked tokens and where an input is not finite.
        metrics: `ratio/*` before the bound, `weight/*` after it, `outside/mean` the share of tokens out of bounds.

    Raises:
        ValueError: an unknown level or bound, bounds that exclude each other, or a shape differs.

    Example:
        >>> old, rollout = torch.tensor([[0.0, 0.0]]), torch.tensor([[-1.0, 2.3]])
        >>> importance_weights(old, rollout, torch.ones(1, 2), high=2.0)[0]
        tensor([[2.0000, 0.1003]])
    """
    if bound not in BOUNDS:
        raise ValueError(f"bound: {bound!r} is unknown; one of {', '.join(BOUNDS)}")
    check_bounds(low, high)
    check_rows(response_mask, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    live = live_tokens(response_mask, old_log_prob, rollout_log_prob)
    log_w = log_weight(old_log_prob.detach(), rollout_log_prob.detach(), response_mask, level=level)
    outside = live & ~inside(log_w, low, high)
    ratio = select(exp_clamped(log_w), live, log_w.dtype)
    floor, ceiling = low or 0.0, math.inf if high is None else high
    # Clamping the masked weights too keeps a weight on the bound from exceeding it by a rounding.
    weights = select(ratio.clamp(floor, ceiling), live & ~outside if bound == "mask" else live, ratio.dtype)
    metrics = spread_metrics("ratio", ratio, live) | mean_metric("outside", outside, live)
    if normalize or mean is not None:
        if mean is None:
            total, count = weight_total(weights, response_mask, level=level)
            mean = total / count.clamp(min=1)
        mean = torch.as_tensor(mean, device=weights.device).detach().to(weights.dtype)
        weights = torch.where(mean > 0, weights / torch.where(mean > 0, mean, 1.0), 0.0).clamp(max=ceiling)
    metrics |= spread_metrics("weight", weights, live) | token_counts(response_mask, live)
    return weights, metrics


def weight_total(weights: Tensor, response_mask: Tensor, *, level: str) -> tuple[Tensor, Tensor]:
    """Sum and count of the weights, over tokens or, at a sequence level, over rows; both add up over a step.

    Example:
        >>> weights, mask = torch.tensor([[2.0, 2.0], [1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
        >>> weight_total(weights, mask, level="sequence_product")
        (tensor(3.), tensor(2.))
    """
    trainable = bool_mask(response_mask)
    if level in SEQUENCE_LEVELS:
        # A removed token is 0 in a row that repeats its weight on the others.
        row = select(weights, trainable, weights.dtype).amax(dim=1) if weights.numel() else weights.sum(dim=1)
        return row.sum(), trainable.any(dim=1).sum().to(weights.dtype)
    return masked_sum(weights, trainable), trainable.sum().to(weights.dtype)
