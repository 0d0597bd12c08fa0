"""Surrogates: the differentiable term of each token, one method a file."""

from trimtab.policy_loss.ppo_clip import ppo_clip

__all__ = ["ppo_clip"]
