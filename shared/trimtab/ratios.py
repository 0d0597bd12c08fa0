"""Log ratios of two policies, per token and at the five levels at which methods use them."""

import torch
from torch import Tensor

from trimtab.masking import masked_mean, masked_sum
from trimtab.tensors import check_rows, float_dtype, live_tokens, select

LEVELS = ("token", "sequence_product", "sequence_geometric", "prefix_product", "prefix_min")
SEQUENCE_LEVELS = ("sequence_product", "sequence_geometric")


def log_ratio(new_log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    r"""Log of new over old for each token, 0 where it does not count.

    .. math:: \log r_{i,t} = \log \pi_{new}(y_{i,t}) - \log \pi_{old}(y_{i,t})

    Paper: the ratio of PPO, Schulman et al. 2017, eq. 6 (https://arxiv.org/abs/1707.06347). Differs: nothing; it is
    not clamped.

    Args:
        new_log_prob: (B, T); carries its gradient.
        old_log_prob: (B, T); carries its gradient too, if it has one.
        response_mask: (B, T), 1 = the loss may use this token.

    Returns:
        (B, T) in nats; 0 at masked tokens and at live ones where either input is not finite.

    Raises:
        ValueError: a shape differs.

    Example:
        >>> log_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, 0.0]]), torch.tensor([[1, 0]]))
        tensor([[0.5000, 0.0000]])
    """
    check_rows(response_mask, new_log_prob=new_log_prob, old_log_prob=old_log_prob)
    live = live_tokens(response_mask, new_log_prob, old_log_prob)
    dtype = float_dtype(new_log_prob, old_log_prob)
    return select(new_log_prob, live, dtype) - select(old_log_prob, live, dtype)


def log_weight(new_log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor, *, level: str) -> Tensor:
    r"""Log importance weight of each token at a level.

    .. math::
        \text{token: } \ell_t \quad
        \text{sequence\_product: } \sum_s \ell_s \quad
        \text{sequence\_geometric: } \tfrac{1}{|y|} \sum_s \ell_s \quad
        \text{prefix\_product: } \sum_{s \le t} \ell_s \quad
        \text{prefix\_min: } \min\bigl(0, \min_{s < t} \ell_s\bigr) + \ell_t

    with :math:`\ell = \log r` over the live tokens only.

    Paper: token TIS, Yao et al. 2025; sequence levels, Liu et al. 2025 (richardli.xyz/rl-collapse); geometric, GSPO,
    eq. 7 (https://arxiv.org/abs/2507.18071); prefix_min, MinPRO (https://arxiv.org/abs/2601.22718). Differs: the
    prefix is strictly before t and an empty one is 1, so that `prefix_min` never exceeds the token's own ratio;
    the paper's text leaves this cap open.

    Args:
        new_log_prob: (B, T); carries its gradient.
        old_log_prob: (B, T); carries its gradient too, if it has one.
        response_mask: (B, T), 1 = the loss may use this token.
        level: one of `LEVELS`.

    Returns:
        (B, T) in nats, unclamped. A sequence level repeats its value on every live token; masked and removed tokens
        are 0.

    Raises:
        ValueError: an unknown level, or a shape differs.

    Example:
        >>> new, old = torch.tensor([[0.2, -0.4, 0.1]]), torch.zeros(1, 3)
        >>> log_weight(new, old, torch.ones(1, 3), level="prefix_min")
        tensor([[ 0.2000, -0.4000, -0.3000]])
    """
    if level not in LEVELS:
        raise ValueError(f"level: {level!r} is unknown; one of {', '.join(LEVELS)}")
    token = log_ratio(new_log_prob, old_log_prob, response_mask)
    if level == "token":
        return token
    live = live_tokens(response_mask, new_log_prob, old_log_prob)
    if level == "sequence_product":
        value = masked_sum(token, live, dim=1).unsqueeze(1).expand_as(token)
    elif level == "sequence_geometric":
        value = masked_mean(token, live, dim=1).unsqueeze(1).expand_as(token)
    elif level == "prefix_product":
        value = token.cumsum(dim=1)
    else:
        # A dead token's 0 is neutral for the minimum, since the empty prefix counts as 1 in any case.
        before = torch.cat([torch.zeros_like(token[:, :1]), token[:, :-1]], dim=1)
        value = before.clamp(max=0).cummin(dim=1).values + token
    return select(value, live, token.dtype)
