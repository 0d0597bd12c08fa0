"""`trimtab recipes` and `trimtab show`."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from trimtab.recipe import Recipe, list_recipes, load_recipe
from trimtab.recipe.frameworks import OTHERS
from trimtab.recipe.load import find, parse
from trimtab.recipe.paths import leaves
from trimtab.recipe.pending import pending

FRAMEWORKS = ("TRL", "veRL")


def print_recipes(console: Console) -> None:
    """The bundled recipes, with what each mirrors."""
    table = Table("recipe", "mirrors", "paper")
    for name in list_recipes():
        tree = parse(find(name))
        paper = (tree.get("reference") or {}).get("arxiv")
        table.add_row(name, str(tree.get("title", "")), f"arXiv {paper}" if paper else "")
    console.print(table)


def print_recipe(name: str, overrides: Sequence[str], console: Console) -> None:
    """Every value of a recipe with its source, and where the frameworks' own defaults or meanings differ."""
    recipe = load_recipe(name, overrides)
    table = Table("key", "value", "source", *(f"{framework}'s own" for framework in FRAMEWORKS))
    for path, value in leaves(recipe.model_dump(mode="json", exclude={"sources", "name", "title", "reference"})):
        others = OTHERS.get(path, {})
        table.add_row(path, str(value), source_of(recipe, path), *(others.get(name, "") for name in FRAMEWORKS))
    console.print(f"{recipe.name}: {recipe.title}")
    console.print(table)
    for text in pending(recipe):
        console.print(f"PENDING, does not act: {text}", style="yellow")


def source_of(recipe: Recipe, path: str) -> str:
    """The origin of a value: that of its own path, or of the nearest section above."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if found := recipe.sources.get(".".join(parts[:length])):
            return found
    return ""
