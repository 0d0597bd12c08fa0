"""Which groups are worth training on."""

import torch
from torch import Tensor


def keep_informative_groups(scores: Tensor, group_ids: Tensor) -> Tensor:
    r"""Whether a row's group has answers of different scores: only then does it teach anything.

    .. math:: keep_i = \Bigl[\max_{j \in g(i)} s_j > \min_{j \in g(i)} s_j\Bigr]

    Paper: dynamic sampling, DAPO, eq. 11 (https://arxiv.org/abs/2503.14476): 0 < correct < G. Differs: nothing. Give
    it the raw score, accuracy say, and not the shaped reward: a length penalty sets all-wrong answers apart.

    Args:
        scores: (B,) raw score of each answer; one that is not finite is ignored.
        group_ids: (B,) int; rows of one prompt share an id, in any order.

    Returns:
        (B,) bool, the same for all rows of a group; False where fewer than two scores are finite.

    Raises:
        ValueError: a shape differs.

    Example:
        >>> keep_informative_groups(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 3, 3]))
        tensor([ True,  True, False, False])
    """
    if scores.dim() != 1 or group_ids.shape != scores.shape:
        raise ValueError(
            f"scores and group_ids must both be (B,), got {tuple(scores.shape)} and {tuple(group_ids.shape)}"
        )
    value = scores.detach().double()
    finite = torch.isfinite(value)
    group = torch.unique(group_ids, return_inverse=True)[1]
    low = torch.full_like(value, torch.inf).scatter_reduce(0, group, torch.where(finite, value, torch.inf), "amin")
    high = torch.full_like(value, -torch.inf).scatter_reduce(0, group, torch.where(finite, value, -torch.inf), "amax")
    return high[group] > low[group]
