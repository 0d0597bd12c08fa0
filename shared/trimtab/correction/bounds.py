"""Bounds on the ratio old/rollout: checked once, inclusive, compared in log space."""

import math

import torch
from torch import Tensor


def check_bounds(low: float | None, high: float | None) -> None:
    """Bounds on a ratio are positive and in order, or ValueError says which is not."""
    if low is not None and not low >= 0:
        raise ValueError(f"low: {low} bounds a ratio; 0 or more, or None")
    if high is not None and not high > 0:
        raise ValueError(f"high: {high} bounds a ratio; above 0, or None")
    if low is not None and high is not None and low > high:
        raise ValueError(f"low: {low} is above high: {high}")


def inside(log_w: Tensor, low: float | None, high: float | None) -> Tensor:
    """Bool: exp(log_w) lies within the bounds, both inclusive. Compared in log space, where exp cannot round.

    A ratio that was built to equal a bound, from log-probs of a few nats, may miss it by some units in the last place.
    """
    slack = _slack(log_w)
    keep = torch.ones_like(log_w, dtype=torch.bool)
    if low:
        keep = keep & (log_w >= math.log(low) - slack)
    if high is not None:
        keep = keep & (log_w <= math.log(high) + slack)
    return keep


def at_most(divergence: Tensor, high: float | None) -> Tensor:
    """Bool: k2 or k3 lies within the bound, inclusive, with the slack of a log ratio times the slope there."""
    if high is None:
        return torch.ones_like(divergence, dtype=torch.bool)
    return divergence <= high + _slack(divergence) * (high + math.sqrt(2 * high))


def _slack(x: Tensor) -> float:
    return 8 * torch.finfo(x.dtype).eps
