"""TRL reward functions from the rewards of a recipe."""

from collections.abc import Callable
from typing import Any

import torch

from trimtab.errors import TrimtabError
from trimtab.recipe import Recipe
from trimtab.rewards import overlong_penalty

RewardFunction = Callable[..., list[float]]
GRADERS = {"math": "math_reward", "exact": "exact_match_reward"}


def reward_functions(recipe: Recipe) -> tuple[list[RewardFunction], list[float]]:
    """The recipe's rewards as TRL calls them, and their weights.

    Raises:
        TrimtabError: the grader's package is not installed.
    """
    return [_reward(node) for node in recipe.reward], [node.weight for node in recipe.reward]


def accuracy_function(recipe: Recipe) -> RewardFunction | None:
    """The reward that says whether an answer is right, if the recipe has one."""
    return next((_reward(node) for node in recipe.reward if node.name in GRADERS), None)


def _reward(node: Any) -> RewardFunction:
    if node.name == "overlong":

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            lengths = torch.tensor([len(ids) for ids in completion_ids])
            return overlong_penalty(lengths, max_length=node.max_length, buffer=node.buffer).tolist()

    else:
        grade = _grader(node.name)

        def reward(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
            return grade(completions, answer)

    reward.__name__ = node.name
    return reward


def _grader(name: str) -> Callable[[list[Any], list[Any]], list[float]]:
    try:
        from trimtab import graders

        return getattr(graders, GRADERS[name])
    except ImportError as error:
        raise TrimtabError(f"reward {name}: {error}") from None
