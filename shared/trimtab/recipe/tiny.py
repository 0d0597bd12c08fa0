"""`--tiny`: any recipe on the embedded model and task, sized for two CPU cores.

The method stays the recipe's own; what changes is the size: model, data, lengths, batch, learning rate, precision.
"""

from collections.abc import Sequence
from typing import Any

from trimtab.recipe.load import build_recipe, find, parse
from trimtab.recipe.paths import leaves
from trimtab.recipe.schema import Recipe
from trimtab.recipe.sources import restate

MODEL = "embedded:arithmetic"
DATA = {"train": MODEL, "evaluation": MODEL, "prompt": "prompt", "answer": "answer", "max_prompt_length": 8}
MAX_LENGTH = 5  # three digits, the end, and one token to spare
GROUP_SIZE = 8
ROWS = 256
UPDATES = 4


def shrink(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a valid recipe with the sizes of the embedded model; up to four updates on a rollout are kept.

    Example:
        >>> tree = {"rollout": {"group_size": 16, "prompts_per_step": 512}, "training": {"mini_batch_size": 512}}
        >>> shrink(tree)["training"]["mini_batch_size"]
        64
    """
    rollout, training = tree.get("rollout", {}), tree.get("training", {})
    group_size = min(int(rollout.get("group_size", GROUP_SIZE)), GROUP_SIZE)
    rows = int(rollout.get("group_size", 1)) * int(rollout.get("prompts_per_step", 1))
    updates = min(max(rows // int(training.get("mini_batch_size", rows)), 1), UPDATES)
    prompts = ROWS // (group_size * updates) * updates  # so that the updates divide the rows
    mini_batch = prompts * group_size // updates
    small = tree | {
        "model": MODEL,
        "data": dict(DATA),
        "reward": [_reward(node) for node in tree.get("reward", [])],
        "rollout": rollout
        | {"engine": "transformers", "group_size": group_size, "prompts_per_step": prompts, "max_length": MAX_LENGTH},
        "training": training
        | {"mini_batch_size": mini_batch, "micro_batch_size": None, "steps": 20, "checkpoint_every": 10},
        "optimizer": tree.get("optimizer", {}) | {"lr": 3.0e-4, "warmup_steps": 2},
        "precision": {"train": "fp32", "rollout": "auto", "lm_head": "auto", "kv_cache": "auto"},
    }
    return small | {"sources": restate(tree.get("sources", {}), dict(leaves(tree)), dict(leaves(small)))}


def _reward(node: Any) -> Any:
    if isinstance(node, dict) and node.get("name") == "overlong":
        return node | {"max_length": MAX_LENGTH, "buffer": 1}
    return node


def sized_recipe(name: str, overrides: Sequence[str], *, tiny: bool) -> Recipe:
    """A recipe with its overrides, at its own size or the embedded model's; what is shrunk must be a recipe."""
    tree = parse(find(name))
    if tiny:
        tree = shrink(build_recipe(tree, source=name).model_dump(mode="json"))
    return build_recipe(tree, overrides, source=name)
