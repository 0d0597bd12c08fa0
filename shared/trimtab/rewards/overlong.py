"""The soft punishment of answers that grow towards the length limit."""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    r"""Penalty of an answer for its length: none, then linear over the buffer, then -1.

    .. math::
        R(|y|) = \begin{cases} 0 & |y| \le L - c \\ (L - c - |y|) / c & L - c < |y| \le L \\ -1 & |y| > L \end{cases}

    Paper: DAPO, eq. 13 (https://arxiv.org/abs/2503.14476), L = 20480 and c = 4096. Differs: nothing; a buffer of 0
    is the hard limit that the formula tends to.

    Args:
        lengths: (B,) response lengths in tokens.
        max_length: L, in tokens; the length of the response alone, without the prompt.
        buffer: c, in tokens; at most `max_length`.

    Returns:
        (B,) float32 in [-1, 0].

    Raises:
        ValueError: a length limit that is not positive, or a buffer outside [0, max_length].

    Example:
        >>> overlong_penalty(torch.tensor([16384, 18432, 20480, 20481]), max_length=20480, buffer=4096)
        tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    if not max_length > 0:
        raise ValueError(f"max_length: {max_length} must be above 0")
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer: {buffer} must lie between 0 and max_length ({max_length})")
    length = torch.as_tensor(lengths).to(torch.float32)
    over = (length - (max_length - buffer)).clamp(min=0)
    penalty = -(over / buffer).clamp(max=1) if buffer else -(over > 0).to(torch.float32)
    return penalty + 0.0  # no negative zero
