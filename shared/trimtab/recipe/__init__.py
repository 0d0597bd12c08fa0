"""Recipes: one typed YAML a pipeline, valid for every back end."""

from trimtab.recipe.load import list_recipes, load_recipe
from trimtab.recipe.schema import Recipe

__all__ = ["Recipe", "list_recipes", "load_recipe"]
