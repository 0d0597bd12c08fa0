"""What every surrogate starts from: the live tokens, their log ratio and their advantage."""

from typing import NamedTuple

from torch import Tensor

from trimtab.masking import masked_mean
from trimtab.ratios import log_ratio
from trimtab.tensors import check_rows, expand_advantages, float_dtype, live_tokens, select


class Inputs(NamedTuple):
    """Checked and cleaned inputs, all (B, T); what is not live is 0."""

    live: Tensor
    log_prob: Tensor
    log_ratio: Tensor
    advantage: Tensor


def read_inputs(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Inputs:
    """Check the shapes and select before any arithmetic; only `log_prob` keeps its gradient.

    Raises:
        ValueError: a shape differs.
    """
    check_rows(response_mask, log_prob=log_prob, old_log_prob=old_log_prob)
    advantages = expand_advantages(advantages, response_mask)
    live = live_tokens(response_mask, log_prob, old_log_prob, advantages)
    dtype = float_dtype(log_prob, old_log_prob, advantages)
    ratio = log_ratio(log_prob, old_log_prob.detach(), live).to(dtype)
    return Inputs(live, select(log_prob, live, dtype), ratio, select(advantages, live, dtype))


def row_mean(x: Tensor, live: Tensor) -> Tensor:
    """(B, T) each row's mean over its live tokens, on every token."""
    return masked_mean(x, live, dim=1).unsqueeze(1).expand_as(x)
