"""CISPO: the token ratio as a bounded weight."""

from torch import Tensor

from trimtab.metrics import Metrics
from trimtab.policy_loss.inputs import read_inputs
from trimtab.policy_loss.weighting import weighted_loss


def cispo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cap: float,
    floor: float = 0.0,
) -> tuple[Tensor, Metrics]:
    r"""The policy-gradient loss of each token, weighted by its bounded ratio, before aggregation.

    .. math:: l_t = -\mathrm{sg}\bigl[\mathrm{clamp}(r_t, floor, cap)\bigr] A_t \log \pi_\theta(y_t)

    Paper: MiniMax-M1, eq. 4 and 5 (https://arxiv.org/abs/2506.13585). Differs: bounds are those of the ratio itself.
    The paper writes 1 + epsilon, did not publish its epsilon, and has no lower bound in effect [P], so `cap` has no
    default; ScaleRL uses a cap of 5 [S]. TRL's `epsilon_high` is this cap; veRL's `clip_ratio_high` is cap - 1, and its
    default lower bound of 0.8 is not the paper's.

    Args:
        log_prob: (B, T) current policy; carries the gradient.
        old_log_prob: (B, T) the trainer's recompute before the update; constant.
        advantages: (B, T) or (B,); constant.
        response_mask: (B, T), 1 = the loss may use this token.
        cap: upper bound of the ratio.
        floor: lower bound of the ratio; 0 is none.

    Returns:
        per_token_loss: (B, T); 0 at masked tokens and where an input is not finite.
        metrics: `ratio/*` before the bounds, `weight/*` after them; `clip/mean`, `clip_high/mean`, `clip_low/mean`:
            shares of live tokens out of bounds. Their gradient is bounded, not stopped.

    Raises:
        ValueError: bounds that exclude each other, or a shape differs.

    Example:
        >>> import torch
        >>> new, old = torch.tensor([[-0.5, -0.1]]), torch.tensor([[-2.5, -0.1]])
        >>> cispo(new, old, torch.tensor([2.0]), torch.ones(1, 2), cap=5.0)[0]
        tensor([[5.0000, 0.2000]])
    """
    inputs = read_inputs(log_prob, old_log_prob, advantages, response_mask)
    return weighted_loss(inputs.log_ratio, inputs, response_mask, cap=cap, floor=floor)
