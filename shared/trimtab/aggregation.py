"""From a loss per token to one number, with a denominator that is stated."""

import torch
from torch import Tensor

from trimtab.masking import masked_mean, masked_sum
from trimtab.tensors import bool_mask, check_rows

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")

Count = Tensor | float | None


def aggregate(
    per_token_loss: Tensor,
    response_mask: Tensor,
    *,
    mode: str,
    num_tokens: Count = None,
    num_sequences: Count = None,
    max_length: Count = None,
) -> Tensor:
    r"""This batch's share of the step's loss.

    .. math::
        \text{token-mean: } \frac{\sum_{i,t} m l}{N_{tok}} \quad
        \text{token-sum: } \sum_{i,t} m l \quad
        \text{seq-mean-token-mean: } \frac{1}{N_{seq}} \sum_i \frac{\sum_t m l}{T_i} \quad
        \text{seq-mean-token-sum: } \frac{1}{N_{seq}} \sum_{i,t} m l \quad
        \text{-norm: } \frac{1}{N_{seq} L} \sum_{i,t} m l

    Paper: seq-mean-token-mean, GRPO, eq. 3 (https://arxiv.org/abs/2402.03300); token-mean, DAPO, eq. 8
    (https://arxiv.org/abs/2503.14476); the constant L, Dr. GRPO (https://arxiv.org/abs/2503.20783). Differs: DAPO and
    GRPO normalise within one question's group, we over the whole optimizer step, as every implementation does. The
    shares of the micro-batches and ranks of a step add up to the same loss however the step was split.

    Args:
        per_token_loss: (B, T); carries the gradient. Masked cells may hold anything.
        response_mask: (B, T), 1 = the loss may use this token.
        mode: one of `MODES`.
        num_tokens: live tokens of the whole optimizer step; default: of this batch.
        num_sequences: rows with a live token of the whole step; default: of this batch.
        max_length: the constant L of seq-mean-token-sum-norm, in tokens. It must not depend on the padding.

    Returns:
        0-dim loss; 0 with a zero gradient where the denominator is 0.

    Raises:
        ValueError: an unknown mode, a missing `max_length`, or a shape differs.

    Example:
        >>> loss, mask = torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
        >>> aggregate(loss, mask, mode="token-mean"), aggregate(loss, mask, mode="seq-mean-token-mean")
        (tensor(3.), tensor(3.5000))
    """
    check_rows(response_mask, per_token_loss=per_token_loss)
    check_mode(mode, max_length)
    live = bool_mask(response_mask)
    if mode == "seq-mean-token-mean":
        total = masked_mean(per_token_loss, live, dim=1).sum()
    else:
        total = masked_sum(per_token_loss, live)
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        return _divide(total, live.sum() if num_tokens is None else num_tokens)
    total = _divide(total, live.any(dim=1).sum() if num_sequences is None else num_sequences)
    return _divide(total, max_length) if mode == "seq-mean-token-sum-norm" else total


def check_mode(mode: str, max_length: Count = None) -> None:
    """A known mode with what it needs, or ValueError says what is missing."""
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is unknown; one of {', '.join(MODES)}")
    if isinstance(max_length, int | float) and max_length < 0:
        raise ValueError(f"max_length: {max_length} is a number of tokens; it cannot be negative")
    if mode == "seq-mean-token-sum-norm" and max_length is None:
        raise ValueError("mode: seq-mean-token-sum-norm needs max_length; the padded width would change with the batch")


def _divide(total: Tensor, count: Count) -> Tensor:
    denominator = torch.as_tensor(count, device=total.device).detach().to(total.dtype)
    empty = denominator == 0
    return torch.where(empty, torch.zeros_like(total), total / torch.where(empty, 1.0, denominator))
