"""What a run will do, in words, before it does it."""

from enum import Enum
from typing import Any

from trimtab.recipe import Recipe
from trimtab.recipe.inert import inert
from trl_ext.translate import ARGUMENTS


def describe(recipe: Recipe, args: Any, *, own_rewards: bool, own_data: bool) -> str:
    """The effective settings of a trainer, a line each, and what does not act."""
    node = recipe.objective
    uses = [("surrogate", node.surrogate)]
    uses += [(kind, use) for kind in ("weights", "masks", "penalties") for use in getattr(node, kind)]
    lines = [f"recipe {recipe.name}: effective settings in TRL"]
    lines += [f"  {kind}: {_spell(use)}" for kind, use in uses]
    lines += [f"  aggregation: {_spell(node.aggregation)}; old log-probs: {node.old_log_prob}"]
    lines += [f"  advantage: {_spell(recipe.advantage)}"]
    lines += [f"  {name} = {_plain(getattr(args, name))}  ({key})" for name, (key, _) in ARGUMENTS.items()]
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    lines += [f"  {name} = {getattr(args, name)}" for name in sizes]
    if own_rewards:
        lines.append("  rewards: the functions passed to the trainer")
    else:
        lines += [f"  reward: {_spell(reward)}" for reward in recipe.reward]
    if own_data:
        lines.append("  data: the data set passed to the trainer")
    lines += [f"  DOES NOT ACT: {text}" for text in inert(recipe)]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _spell(section: Any) -> str:
    values = section.model_dump(exclude_none=True)
    name = values.pop("name", None)
    text = ", ".join(f"{key}={value}" for key, value in values.items())
    return f"{name}({text})" if name else text
