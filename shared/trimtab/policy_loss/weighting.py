"""Surrogates whose ratio is a bounded, detached weight on A log pi: no token ever loses its gradient to a clip."""

from torch import Tensor

from trimtab.metrics import Metrics, mean_metric, spread_metrics, token_counts
from trimtab.policy_loss.inputs import Inputs
from trimtab.tensors import exp_clamped, select


def weighted_loss(
    log_weight: Tensor, inputs: Inputs, response_mask: Tensor, *, cap: float, floor: float
) -> tuple[Tensor, Metrics]:
    r"""The loss :math:`-\mathrm{sg}[\mathrm{clamp}(w, floor, cap)] \, A \log \pi`, and how often the bounds act.

    Args:
        log_weight: (B, T) log of the weight.
        inputs: of the surrogate.
        response_mask: (B, T), for the counts.
        cap: upper bound of the weight itself, not a distance from 1.
        floor: lower bound of the weight itself; 0 is none.

    Raises:
        ValueError: bounds that exclude each other.
    """
    if not cap > 0:
        raise ValueError(f"cap: {cap} bounds a ratio; above 0")
    if not 0 <= floor <= cap:
        raise ValueError(f"floor: {floor} must lie between 0 and cap ({cap})")
    raw = exp_clamped(log_weight)
    weight = raw.clamp(floor, cap)
    loss = -weight * inputs.advantage * inputs.log_prob
    metrics = spread_metrics("ratio", raw, inputs.live) | spread_metrics("weight", weight, inputs.live)
    metrics |= mean_metric("clip", (raw > cap) | (raw < floor), inputs.live)
    metrics |= mean_metric("clip_high", raw > cap, inputs.live) | mean_metric("clip_low", raw < floor, inputs.live)
    return select(loss, inputs.live, loss.dtype), metrics | token_counts(response_mask, inputs.live)
