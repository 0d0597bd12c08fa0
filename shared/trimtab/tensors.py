"""What every core does to its inputs first: check shapes, find the live tokens, select before arithmetic."""

import torch
from torch import Tensor

MAX_EXPONENT = 20.0
"""Exponents are bounded here: e^20 = 4.9e8 still leaves room for float32 sums. Project-defined, as in verl."""


def float_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where any input is float64, else float32: a bfloat16 sum of a long answer is not a sum."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def bool_mask(response_mask: Tensor) -> Tensor:
    """The mask as bool; it may arrive as bool, int or float 0/1."""
    return response_mask if response_mask.dtype == torch.bool else response_mask != 0


def check_rows(response_mask: Tensor, **tensors: Tensor) -> None:
    """Every tensor has the mask's (B, T) shape, or ValueError names the one that has not."""
    if response_mask.dim() != 2:
        raise ValueError(f"response_mask must have shape (B, T), got {tuple(response_mask.shape)}")
    for name, tensor in tensors.items():
        if tensor.shape != response_mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but response_mask has {tuple(response_mask.shape)}"
            )


def expand_advantages(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(B,) advantages broadcast over the tokens; (B, T) ones pass. Always detached: they are constants of the loss."""
    if advantages.shape == response_mask.shape[:1]:
        advantages = advantages.unsqueeze(1).expand(response_mask.shape)
    check_rows(response_mask, advantages=advantages)
    return advantages.detach()


def live_tokens(response_mask: Tensor, *values: Tensor) -> Tensor:
    """(B, T) bool: trainable, and finite in every one of the values. What is not is removed from the result."""
    live = bool_mask(response_mask)
    for value in values:
        live = live & torch.isfinite(value.detach())
    return live


def select(x: Tensor, keep: Tensor, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """`x` where kept, else `fill`, chosen before any arithmetic: 0 * NaN is NaN, in the value and in the gradient."""
    return torch.where(keep, x, torch.full((), fill, dtype=x.dtype, device=x.device)).to(dtype)


def exp_tangent(x: Tensor) -> Tensor:
    """exp, continued as its tangent beyond +20: finite, and with a gradient of the right sign everywhere.

    A plain clamp would kill the gradient there, and with it the pull back towards the old policy.
    """
    bounded = x.clamp(max=MAX_EXPONENT)
    return torch.exp(bounded) * (1 + (x - bounded))


def exp_clamped(x: Tensor) -> Tensor:
    """exp of a detached exponent, bounded to +-20."""
    return torch.exp(x.detach().clamp(-MAX_EXPONENT, MAX_EXPONENT))
