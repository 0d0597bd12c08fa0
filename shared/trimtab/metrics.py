"""Metrics that reduce exactly: over micro-batches, ranks and updates, in any order."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trimtab.masking import masked_mean
from trimtab.tensors import bool_mask, float_dtype, select

Metrics = dict[str, Tensor]


def mean_metric(name: str, x: Tensor, keep: Tensor) -> Metrics:
    """`name/mean` with the `name/count` it was taken over.

    Example:
        >>> mean_metric("clip", torch.tensor([1.0, 0.0, 1.0]), torch.tensor([True, True, False]))
        {'clip/mean': tensor(0.5000), 'clip/count': tensor(2.)}
    """
    x = x.detach().to(float_dtype(x))
    return {f"{name}/mean": masked_mean(x, keep), f"{name}/count": bool_mask(keep).sum().to(x.dtype)}


def spread_metrics(name: str, x: Tensor, keep: Tensor) -> Metrics:
    """`name/mean`, `/min`, `/max` and the `/count` they were taken over; all 0 where nothing is kept.

    Example:
        >>> spread_metrics("ratio", torch.tensor([1.0, 3.0]), torch.tensor([True, True]))["ratio/max"]
        tensor(3.)
    """
    x = x.detach()
    result = mean_metric(name, x, keep)
    for bound, fill in (("min", torch.inf), ("max", -torch.inf)):
        values = select(x, bool_mask(keep), float_dtype(x), fill=fill)
        extreme = (values.amin() if bound == "min" else values.amax()) if x.numel() else values.new_zeros(())
        result[f"{name}/{bound}"] = torch.where(result[f"{name}/count"] > 0, extreme, 0.0)
    return result


def token_counts(response_mask: Tensor, live: Tensor) -> Metrics:
    """How many tokens are trainable, and how many of these were removed for a non-finite input."""
    trainable = bool_mask(response_mask)
    return {
        "tokens/count": trainable.sum().to(torch.float32),
        "nonfinite/count": (trainable & ~live).sum().to(torch.float32),
    }


def combine(parts: Iterable[Mapping[str, Tensor]]) -> Metrics:
    """One set of metrics from many, as if all had been computed at once.

    A mean is weighted by its count, counts and sums are added, a max or min is taken over the parts that saw anything.

    Args:
        parts: metrics of micro-batches, ranks or updates; keys end in /mean, /sum, /max, /min or /count.

    Returns:
        The metrics of the whole.

    Raises:
        ValueError: a key with another ending, or a mean, max or min without its count.

    Example:
        >>> a = {"kl/mean": torch.tensor(1.0), "kl/count": torch.tensor(1.0)}
        >>> b = {"kl/mean": torch.tensor(4.0), "kl/count": torch.tensor(2.0)}
        >>> combine([a, b])["kl/mean"]
        tensor(3.)
    """
    parts = list(parts)
    result: Metrics = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        name, _, kind = key.rpartition("/")
        having = [part for part in parts if key in part]
        values = torch.stack([part[key].detach().double() for part in having])
        if kind in ("count", "sum"):
            total = values.sum()
        elif kind in ("mean", "max", "min"):
            if any(f"{name}/count" not in part for part in having):
                raise ValueError(f"metric {key!r} comes without {name}/count, so that it cannot be combined")
            counts = torch.stack([part[f"{name}/count"].detach().double() for part in having])
            if kind == "mean":
                total = (values * counts).sum() / counts.sum().clamp(min=1)
            else:
                seen = values[counts > 0]
                total = (seen.amax() if kind == "max" else seen.amin()) if seen.numel() else values.new_zeros(())
        else:
            raise ValueError(f"metric {key!r} must end in /mean, /sum, /max, /min or /count")
        result[key] = total.to(having[0][key].dtype)
    return result
