"""Surrogates: the differentiable term of each token, one method a file."""

from trimtab.policy_loss.cispo import cispo
from trimtab.policy_loss.gspo import gspo, gspo_token
from trimtab.policy_loss.minpro import minpro
from trimtab.policy_loss.ppo_clip import ppo_clip
from trimtab.policy_loss.sapo import sapo

__all__ = ["cispo", "gspo", "gspo_token", "minpro", "ppo_clip", "sapo"]
