"""Advantages from the rewards of a group: no critic."""

import torch
from torch import Tensor

from trimtab.tensors import float_dtype

BASELINES = ("mean", "leave_one_out")
SCALES = ("group_std", "batch_std", "none")


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, baseline: str = "mean", scale: str = "group_std", eps: float = 1e-6
) -> Tensor:
    r"""Advantage of each answer over the others to the same prompt.

    .. math:: A_i = \frac{R_i - b_i}{\sigma + \epsilon} \qquad
        b_i = \tfrac1n \sum_j R_j \;\text{(mean)} \quad
        b_i = \tfrac1{n-1} \sum_{j \ne i} R_j \;\text{(leave\_one\_out)}

    Paper: GRPO, section 4.1.2 (https://arxiv.org/abs/2402.03300), eps from verl; leave_one_out, RLOO
    (https://arxiv.org/abs/2402.14740); scale none, Dr. GRPO (https://arxiv.org/abs/2503.20783). Differs: a reward
    that is not finite is left out of its group and gets 0, and equal rewards give exactly 0 (the rounding of a mean
    divided by eps would not).

    Args:
        rewards: (B,) one scalar an answer.
        group_ids: (B,) int; rows of one prompt share an id, in any order.
        baseline: one of `BASELINES`.
        scale: group_std | batch_std | none; sample standard deviation (n - 1) of the finite rewards. batch_std is
            that of all raw rewards.
        eps: added to the standard deviation.

    Returns:
        (B,) float32, or float64 if `rewards` is. 0 in a group with fewer than two finite rewards.

    Raises:
        ValueError: an unknown baseline or scale, or a shape differs.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 3.0, 3.0]), torch.tensor([5, 5, 2, 2]), scale="none")
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline: {baseline!r} is unknown; one of {', '.join(BASELINES)}")
    if scale not in SCALES:
        raise ValueError(f"scale: {scale!r} is unknown; one of {', '.join(SCALES)}")
    if not eps >= 0:
        raise ValueError(f"eps: {eps} is added to a standard deviation; 0 or more")
    if rewards.dim() != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"rewards and group_ids must both be (B,), got {tuple(rewards.shape)} and {tuple(group_ids.shape)}"
        )
    raw = rewards.detach().double()
    finite = torch.isfinite(raw)
    raw = torch.where(finite, raw, 0.0)
    group = torch.unique(group_ids, return_inverse=True)[1]
    size = _group_sum(finite.double(), group)
    # Measured from the group's smallest reward, equal rewards are 0 and large offsets lose no digits.
    value = torch.where(finite, raw - _group_min(torch.where(finite, raw, torch.inf), group), 0.0)
    total = _group_sum(value, group)
    centred = value - total / size.clamp(min=1)
    advantage = value - (total - value) / (size - 1).clamp(min=1) if baseline == "leave_one_out" else centred
    if scale == "group_std":
        variance = _group_sum(torch.where(finite, centred.square(), 0.0), group) / (size - 1).clamp(min=1)
        advantage = _divide(advantage, variance.sqrt() + eps)
    elif scale == "batch_std":
        advantage = _divide(advantage, _sample_std(raw[finite]) + eps)
    return torch.where(finite & (size >= 2), advantage, 0.0).to(float_dtype(rewards))


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """0 where the scale is: with eps 0, equal rewards have none."""
    return torch.where(scale > 0, x / torch.where(scale > 0, scale, 1.0), 0.0)


def _group_sum(x: Tensor, group: Tensor) -> Tensor:
    """Each row's group total, in the rows' order."""
    return torch.zeros(x.numel(), dtype=x.dtype, device=x.device).index_add(0, group, x)[group]


def _group_min(x: Tensor, group: Tensor) -> Tensor:
    start = torch.full_like(x, torch.inf)
    return start.scatter_reduce(0, group, x, reduce="amin")[group]


def _sample_std(x: Tensor) -> Tensor:
    return (x - x.mean()).square().sum().div(x.numel() - 1).sqrt() if x.numel() > 1 else x.new_zeros(())
