"""Sums and means over the tokens that count."""

import torch
from torch import Tensor

from trimtab.tensors import bool_mask, float_dtype, select

Dim = int | tuple[int, ...] | None


def masked_sum(x: Tensor, mask: Tensor, *, dim: Dim = None) -> Tensor:
    r"""Sum of `x` where the mask is 1.

    .. math:: \sum_i m_i x_i

    Paper: none, bookkeeping. Differs: masked cells may hold NaN or inf; they reach neither value nor gradient.

    Args:
        x: any shape; carries its gradient.
        mask: broadcastable to `x`; bool, int or float 0/1.
        dim: axis or axes to sum over; None sums everything.

    Returns:
        The sum in float32, or float64 if `x` is float64. Nothing to sum gives 0.

    Raises:
        ValueError: the mask does not broadcast to `x`.

    Example:
        >>> masked_sum(torch.tensor([1.0, float("nan"), 4.0]), torch.tensor([1, 0, 1]))
        tensor(5.)
    """
    kept = select(x, broadcast_mask(mask, x), float_dtype(x))
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(x: Tensor, mask: Tensor, *, dim: Dim = None) -> Tensor:
    r"""Mean of `x` where the mask is 1; 0 where nothing is.

    .. math:: \frac{\sum_i m_i x_i}{\sum_i m_i}

    Paper: none, bookkeeping. Differs: an empty mean is 0 with a zero gradient, never NaN.

    Args:
        x: any shape; carries its gradient.
        mask: broadcastable to `x`; bool, int or float 0/1.
        dim: axis or axes to average over; None averages everything.

    Returns:
        The mean in float32, or float64 if `x` is float64.

    Raises:
        ValueError: the mask does not broadcast to `x`.

    Example:
        >>> masked_mean(torch.tensor([[1.0, 3.0], [9.0, 9.0]]), torch.tensor([[1, 1], [0, 0]]), dim=1)
        tensor([2., 0.])
    """
    count = masked_sum(torch.ones_like(x, dtype=float_dtype(x)), mask, dim=dim)
    return masked_sum(x, mask, dim=dim) / count.clamp(min=1)


def broadcast_mask(mask: Tensor, x: Tensor) -> Tensor:
    """The mask as bool and of `x`'s shape, or ValueError says that it does not broadcast."""
    try:
        return bool_mask(mask).expand(x.shape)
    except RuntimeError:
        raise ValueError(f"mask of shape {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}") from None
