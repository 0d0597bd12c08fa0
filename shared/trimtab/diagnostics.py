"""How far the sampling policy is from the training one: the numbers to watch."""

import torch
from torch import Tensor

from trimtab.kl import k3_estimate
from trimtab.masking import broadcast_mask, masked_sum
from trimtab.metrics import Metrics, mean_metric, spread_metrics, token_counts
from trimtab.ratios import log_weight
from trimtab.tensors import check_rows, exp_clamped, float_dtype, live_tokens, select


def mismatch_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Metrics:
    r"""The training-inference mismatch of a batch, before any correction.

    .. math::
        B = \frac{\pi_{old}}{\pi_{rollout}} \quad k_1 = -\log B \quad k_3 = B - 1 - \log B \quad
        \chi^2 = E[B^2] - 1

    k1 and k3 estimate KL(rollout || old); a k3 above 1e-3 on a dense model is the field's first warning.

    Paper: Liu et al. 2025 (https://richardli.xyz/rl-collapse), `vllm-kl`. Differs: nothing.

    Args:
        old_log_prob: (B, T) the trainer's recompute before the update.
        rollout_log_prob: (B, T) what the sampler returned.
        response_mask: (B, T), 1 = the loss may use this token.

    Returns:
        `k1`, `k3`, `abs_diff` (of log-probs, nats), `prob_diff`, `ratio`, `chi2_token`, `chi2_sequence`,
        `old_nll` and `rollout_nll` (mean negative log-prob; exp of it is the perplexity), with their counts.

    Raises:
        ValueError: a shape differs.

    Example:
        >>> old, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]])
        >>> round(mismatch_metrics(old, rollout, torch.ones(1, 2))["k1/mean"].item(), 4)
        0.25
    """
    check_rows(response_mask, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    log_b = log_weight(old_log_prob.detach(), rollout_log_prob.detach(), response_mask, level="token")
    sequence = log_weight(old_log_prob.detach(), rollout_log_prob.detach(), response_mask, level="sequence_product")
    live = live_tokens(response_mask, old_log_prob, rollout_log_prob)
    ratio = exp_clamped(log_b)
    old = select(old_log_prob.detach(), live, log_b.dtype)
    rollout = select(rollout_log_prob.detach(), live, log_b.dtype)
    rows = live.any(dim=1)
    row_ratio = exp_clamped(torch.where(rows, sequence.sum(dim=1) / live.sum(dim=1).clamp(min=1), 0.0))
    metrics = mean_metric("k1", -log_b, live) | mean_metric("k3", k3_estimate(log_b), live)
    metrics |= spread_metrics("abs_diff", log_b.abs(), live)
    metrics |= spread_metrics("prob_diff", (old.clamp(max=0).exp() - rollout.clamp(max=0).exp()).abs(), live)
    metrics |= spread_metrics("ratio", ratio, live)
    metrics |= mean_metric("chi2_token", ratio.square() - 1, live)
    metrics |= mean_metric("chi2_sequence", row_ratio.square() - 1, rows)
    metrics |= mean_metric("old_nll", -old, live) | mean_metric("rollout_nll", -rollout, live)
    return metrics | token_counts(response_mask, live)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    r"""Share of the samples that the weights leave in effect.

    .. math:: \frac{(\sum_i w_i)^2}{n \sum_i w_i^2}

    Paper: Kong 1992; in RL for language models, VCPO. Differs: nothing.

    Args:
        weights: any shape, not negative.
        mask: same shape; 1 = counts.

    Returns:
        0-dim share in (0, 1]; 1 for equal weights, 0 where nothing counts.

    Raises:
        ValueError: the mask does not broadcast to `weights`.

    Example:
        >>> effective_sample_size(torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.ones(4))
        tensor(0.5714)
    """
    keep = broadcast_mask(mask, weights) & torch.isfinite(weights)
    weights = select(weights.detach(), keep, float_dtype(weights))
    if weights.numel():  # the share does not depend on the scale, but a square may overflow or vanish
        largest = weights.amax()
        weights = weights / torch.where(largest > 0, largest, 1.0)
    total, squares, count = masked_sum(weights, keep), masked_sum(weights.square(), keep), keep.sum()
    return effective_share(total, squares, count)


def effective_share(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """The effective sample size from sums, which add up over micro-batches and ranks where the share does not.

    Example:
        >>> effective_share(torch.tensor(8.0), torch.tensor(28.0), torch.tensor(4.0))
        tensor(0.5714)
    """
    denominator = count * squares
    return torch.where(denominator > 0, total.square() / torch.where(denominator > 0, denominator, 1.0), 0.0)
