"""Rewards that need no grader, one method a file."""

from trimtab.rewards.overlong import overlong_penalty

__all__ = ["overlong_penalty"]
