"""What a recipe states and nothing will come of: said aloud by every run, never left silent."""

from trimtab.recipe.schema import Recipe


def inert(recipe: Recipe) -> list[str]:
    """A line for each value that does not act: its code is yet to come, or the recipe's other values leave it idle.

    Example:
        >>> from trimtab.recipe import load_recipe
        >>> inert(load_recipe("quickstart"))
        []
    """
    lines, rollout, precision = [], recipe.rollout, recipe.precision
    if recipe.sampling.dynamic is not None:
        lines.append("sampling.dynamic: pending; groups of equal rewards stay in the batch, with advantage 0")
    for node in recipe.reward:
        if node.name == "overlong" and rollout.max_length <= node.max_length - node.buffer:
            begins = node.max_length - node.buffer
            lines.append(f"reward.overlong: begins beyond {begins} tokens, and answers end at {rollout.max_length}")
    if rollout.engine == "transformers" and precision.rollout not in ("auto", precision.train):
        lines.append(f"precision.rollout {precision.rollout}: the training model itself samples, in {precision.train}")
    return lines
