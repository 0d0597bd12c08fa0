"""`trimtab recipes` and `trimtab show`."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from trimtab.recipe import list_recipes
from trimtab.recipe.frameworks import OTHERS
from trimtab.recipe.inert import inert
from trimtab.recipe.load import find, parse
from trimtab.recipe.paths import leaves
from trimtab.recipe.sources import UNSOURCED, source_of
from trimtab.recipe.tiny import sized_recipe

INDENT = "    "
VALUE_WIDTH = 32  # what is longer pushes its source aside


def print_recipes(console: Console) -> None:
    """The bundled recipes, with what each mirrors."""
    table = Table("recipe", "mirrors", "paper", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.no_wrap, column.overflow = column.header != "mirrors", "fold"
    for name in list_recipes():
        tree = parse(find(name))
        reference = tree.get("reference") or {}
        paper = f"arXiv {reference['arxiv']}" if reference.get("arxiv") else "blog" if reference.get("url") else ""
        table.add_row(name, str(tree.get("title", "")), paper)
    console.print(table)


def print_recipe(name: str, overrides: Sequence[str], console: Console, *, tiny: bool = False) -> None:
    """Every value of a recipe with its source, and below it what the frameworks do on their own, where that differs.

    Lines and not a table: no key is ever cut, and each stands at the start of its line for whoever searches the text.
    """
    recipe = sized_recipe(name, overrides, tiny=tiny)
    values = {path: _plain(value) for path, value in leaves(recipe.model_dump(mode="json", exclude=set(UNSOURCED)))}
    notes = dict(_notes(list(values)))
    keys, width = max(map(len, values)), min(VALUE_WIDTH, max(map(len, values.values())))
    console.print(f"{recipe.name}: {recipe.title}", soft_wrap=True)
    console.print("Each line: key, value, source; indented, what a framework does on its own.\n", soft_wrap=True)
    for path, value in values.items():
        line = f"{path:{keys}}  {value:{width}}  {source_of(recipe, path)}".rstrip()
        console.print(line, soft_wrap=True, style="bold" if path in notes else None)
        for note in notes.get(path, ()):
            console.print(textwrap.fill(note, console.width, initial_indent=INDENT, subsequent_indent=INDENT))
    for text in inert(recipe):
        console.print(f"DOES NOT ACT: {text}", style="yellow", soft_wrap=True)


def _plain(value: Any) -> str:
    """A value as a user would write it in an override."""
    return value if isinstance(value, str) else json.dumps(value)


def _notes(paths: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """What the frameworks do on their own, at the key, or at the first key of the section, that it speaks of."""
    for key, others in OTHERS.items():
        if first := next((path for path in paths if path == key or path.startswith(f"{key}.")), None):
            yield first, [f"{framework}: {text}" for framework, text in others.items()]
