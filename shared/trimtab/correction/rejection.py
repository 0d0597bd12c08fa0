"""Rejection: tokens or whole answers that lie too far from the policy that sampled them are dropped."""

from torch import Tensor

from trimtab.correction.bounds import at_most, check_bounds, inside
from trimtab.kl import k3_estimate
from trimtab.metrics import Metrics, mean_metric, spread_metrics, token_counts
from trimtab.ratios import log_weight
from trimtab.tensors import bool_mask, check_rows, exp_clamped, live_tokens, select

RATIO_LEVELS = {
    "token_ratio": "token",
    "sequence_product": "sequence_product",
    "sequence_geometric": "sequence_geometric",
}
DIVERGENCES = ("sequence_max_k2", "sequence_mean_k3")
STATISTICS = (*RATIO_LEVELS, *DIVERGENCES)


def rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    statistic: str,
    low: float | None = None,
    high: float | None = None,
    veto: float | None = None,
) -> tuple[Tensor, Metrics]:
    r"""Which tokens to keep: those whose statistic of B = old/rollout lies within the bounds.

    .. math::
        \text{token\_ratio: } B_t \quad
        \text{sequence\_product: } \prod_t B_t \quad
        \text{sequence\_geometric: } \bigl(\prod_t B_t\bigr)^{1/|y|} \quad
        \text{sequence\_max\_k2: } \max_t \tfrac12 \log^2 B_t \quad
        \text{sequence\_mean\_k3: } \tfrac{1}{|y|} \sum_t (B_t - 1 - \log B_t)

    A sequence statistic out of bounds drops the whole row; so does one live token whose ratio is under `veto`.

    Paper: Liu et al. 2025 (https://richardli.xyz/rl-collapse), which gives 0.5 and 2 for the geometric mean, where
    veRL's presets give 0.999 and 1.001 [C]; the veto, slime's example, 1e-4 [C]. Differs: bounds always hold for
    old/rollout; veRL's `token_k1` and `seq_*_k1` compare the inverse. Whether dropped tokens still count in the
    denominator is the aggregation's choice.

    Args:
        old_log_prob: (B, T) the trainer's recompute before the update.
        rollout_log_prob: (B, T) what the sampler returned.
        response_mask: (B, T), 1 = the loss may use this token.
        statistic: one of `STATISTICS`.
        low: lower bound, inclusive; 0 or None is none. Not for a divergence.
        high: upper bound, inclusive; None is none. For a divergence, in nats (k3) or squared nats (k2).
        veto: lower bound on any single token's ratio; None is none.

    Returns:
        keep: (B, T) bool; False at masked tokens and where an input is not finite.
        metrics: `kept/mean`, `kept_rows/mean`, `statistic/*` over tokens or rows, `veto/mean` over rows where set.

    Raises:
        ValueError: an unknown statistic, `low` given to a divergence, bounds that exclude each other, or a shape.

    Example:
        >>> import torch
        >>> old, rollout = torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, 1.0]])
        >>> rejection_mask(old, rollout, torch.ones(1, 2), statistic="token_ratio", low=0.5, high=5.0)[0]
        tensor([[ True, False]])
    """
    if statistic not in STATISTICS:
        raise ValueError(f"statistic: {statistic!r} is unknown; one of {', '.join(STATISTICS)}")
    if statistic in DIVERGENCES and low is not None:
        raise ValueError(f"low: {low} has no meaning for {statistic}, a divergence; only high bounds it")
    if veto is not None and not veto > 0:
        raise ValueError(f"veto: {veto} bounds a ratio; above 0, or None")
    check_bounds(low, high)
    check_rows(response_mask, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    old, rollout = old_log_prob.detach(), rollout_log_prob.detach()
    live = live_tokens(response_mask, old, rollout)
    token = log_weight(old, rollout, response_mask, level="token")
    if statistic in RATIO_LEVELS:
        log_value = log_weight(old, rollout, response_mask, level=RATIO_LEVELS[statistic])
        keep, value = live & inside(log_value, low, high), exp_clamped(log_value)
    else:
        value = _divergence(token, live, statistic)
        keep = live & at_most(value, high)
    # Every live token of a row has the row's value, so that one of them stands for the row.
    by_token, rows = statistic == "token_ratio", live.any(dim=1)
    metrics = spread_metrics("statistic", value, live if by_token else _first(live))
    if veto is not None:
        vetoed = (live & ~inside(token, veto, None)).any(dim=1)
        keep = keep & ~vetoed.unsqueeze(1)
        metrics |= mean_metric("veto", vetoed, rows)
    metrics |= mean_metric("kept", keep, bool_mask(response_mask)) | mean_metric("kept_rows", keep.any(dim=1), rows)
    return keep, metrics | token_counts(response_mask, live)


def _divergence(log_b: Tensor, live: Tensor, statistic: str) -> Tensor:
    """(B, T) the row's divergence, on each of its tokens."""
    if statistic == "sequence_max_k2":
        row = (log_b.square() / 2).amax(dim=1) if log_b.numel() else log_b.sum(dim=1)
    else:
        row = k3_estimate(log_b).sum(dim=1) / live.sum(dim=1).clamp(min=1)
    return select(row.unsqueeze(1).expand_as(log_b), live, log_b.dtype)


def _first(live: Tensor) -> Tensor:
    return live & (live.cumsum(dim=1) == 1)
