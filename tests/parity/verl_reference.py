"""verl's own functions for the parity tests: imported when first asked for, and called on batches like ours."""

import importlib

import pytest
import torch

HINT = (
    "verl is not here: it needs antlr4-python3-runtime 4.9 and constraints.txt pins 4.13.2. In an environment of its "
    "own: pip install -c <constraints.txt with antlr4-python3-runtime==4.9.3> -e '.[trl,verl,math,dev]'"
)


def load(name):
    """A module of `verl.trainer.ppo`. Without verl the test is skipped; a verl that does not import is an error."""
    pytest.importorskip("verl", reason=HINT)
    return importlib.import_module(f"verl.trainer.ppo.{name}")


def policy_loss(name, batch, *, mode="token-mean", weights=None, mask=None, info=None, **options):
    """Loss and metrics of verl's policy loss, by an actor config with these options."""
    core = load("core_algos")
    config = importlib.import_module("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, global_batch_info=info or {}, **options
    )
    mask = batch["response_mask"] if mask is None else mask
    words = (batch["old_log_prob"], batch["log_prob"], batch["advantages"], mask)
    return core.get_policy_loss_fn(name)(*words, loss_agg_mode=mode, config=config, rollout_is_weights=weights)


def correction(batch, **options):
    """Weights (or None), kept mask and metrics of verl's rollout correction."""
    words = (batch["old_log_prob"], batch["rollout_log_prob"], batch["response_mask"])
    proto, kept, metrics = load("rollout_corr_helper").compute_rollout_correction_and_rejection_mask(*words, **options)
    return None if proto is None else proto.batch["rollout_is_weights"], kept, metrics


def batch(*, seed=0, rows=6, width=7, spread=0.5):
    """Rows of unequal lengths with a gap, one of them fully masked; advantages of both signs and exactly 0.

    The mask is of integers, as verl's trainer makes it: its 1e-8 in a count then vanishes, and does not in float64.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = lambda: torch.randn(rows, width, generator=generator, dtype=torch.float64)  # noqa: E731
    lengths = torch.tensor([7, 1, 5, 0, 3, 6, 2, 4])[:rows]
    mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
    mask[0, 2] = 0
    old = -noise().abs() - 0.5
    advantages = noise()
    advantages[2, 1] = 0.0
    return {
        "log_prob": old + spread * noise(),
        "old_log_prob": old,
        "rollout_log_prob": old - spread * noise(),
        "ref_log_prob": old + spread * noise(),
        "advantages": advantages,
        "response_mask": mask,
    }


def row(log_ratio, advantage):
    """One answer that is this far from the old policy."""
    distance = torch.tensor([log_ratio], dtype=torch.float64)
    old = torch.full_like(distance, -1.0)
    mask = torch.ones_like(distance, dtype=torch.long)
    return {
        "log_prob": old + distance,
        "old_log_prob": old,
        "advantages": torch.full_like(distance, advantage),
        "response_mask": mask,
    }


def engine_row(log_ratio):
    """One answer whose old policy is this far from the one that sampled it."""
    distance = torch.tensor([log_ratio], dtype=torch.float64)
    mask = torch.ones_like(distance, dtype=torch.long)
    return {"old_log_prob": distance, "rollout_log_prob": torch.zeros_like(distance), "response_mask": mask}


def spoilt(inputs, cells, *, value=float("nan"), words=("log_prob", "old_log_prob", "rollout_log_prob")):
    """The batch with a value that is no number in these cells."""
    return inputs | {name: torch.where(cells, value, inputs[name]) for name in words if name in inputs}


def value_and_gradient(loss_of, inputs, word="log_prob"):
    """Loss and its gradient in one word of the batch."""
    leaf = inputs[word].clone().requires_grad_()
    loss = loss_of(inputs | {word: leaf})
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def assert_equal(found, expected, *, atol=1e-10):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, check_dtype=False)
