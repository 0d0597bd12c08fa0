"""What a recipe may state before the code for it exists: said aloud by every run, never left silent."""

from trimtab.recipe.schema import Recipe


def pending(recipe: Recipe) -> list[str]:
    """A line for each value of the recipe that no back end acts on yet.

    Example:
        >>> from trimtab.recipe import load_recipe
        >>> pending(load_recipe("quickstart"))
        []
    """
    lines = []
    if recipe.sampling.dynamic is not None:
        lines.append("sampling.dynamic: groups whose rewards are all equal stay in the batch, with advantage 0")
    return lines
