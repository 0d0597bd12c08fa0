"""What several topics need: a ragged batch, and a comparison with its tolerance."""

import torch
from torch import Tensor

MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],  # a tool's answer in the middle
        [0, 0, 0, 0, 0, 0, 0],  # filtered whole
        [0, 1, 1, 1, 1, 0, 0],
    ]
)
LOG_PROBS = ("log_prob", "old_log_prob", "rollout_log_prob", "ref_log_prob")


def assert_near(actual: Tensor, expected: object, *, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """Equal within a stated tolerance; dtypes may differ, shapes not."""
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def from_ratios(ratios: list[list[float]], *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """New log-probs, with a gradient, and old ones: no two alike, but of the given ratios."""
    ratio = torch.tensor(ratios, dtype=dtype)
    old = torch.linspace(-3, -0.5, ratio.numel(), dtype=dtype).reshape(ratio.shape)
    return (old + ratio.log()).requires_grad_(), old


def ragged_batch(*, dtype: torch.dtype = torch.float32, seed: int = 0, mask: Tensor = MASK) -> dict[str, Tensor]:
    """Log-probs that differ by some tenths of a nat, advantages of both signs, a mask with a hole and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    base = -0.2 - 2 * torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    batch = {
        name: (base - 0.4 * torch.rand(mask.shape, generator=generator, dtype=torch.float64)).to(dtype)
        for name in LOG_PROBS
    }
    batch["advantages"] = torch.randn(mask.shape[0], generator=generator, dtype=torch.float64).to(dtype)
    return batch | {"response_mask": mask.clone()}
