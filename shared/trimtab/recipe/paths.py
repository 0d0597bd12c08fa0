"""Dotted paths into a recipe: `a.b.c`, and `reward.overlong.buffer` or `reward.1.buffer` in a list."""

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.recipe.base import suggest


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree with its path; an empty list or mapping is a value.

    Example:
        >>> list(leaves({"a": {"b": 1}, "c": [{"name": "kl", "x": 2}], "d": []}))
        [('a.b', 1), ('c.kl.name', 'kl'), ('c.kl.x', 2), ('d', [])]
    """
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, (list, tuple)) and node:
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}.{label(node, index)}")
    else:
        yield path, node


def assign(node: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path, in place; sections that are missing or null on the way are made.

    Raises:
        TrimtabError: the path runs through a value, or names no element of a list.

    Example:
        >>> tree = {"reward": [{"name": "overlong", "buffer": 4}]}
        >>> assign(tree, "reward.overlong.buffer", 2)
        >>> tree
        {'reward': [{'name': 'overlong', 'buffer': 2}]}
    """
    keys = path.split(".")
    *parents, last = keys
    here: Any = node
    for depth, key in enumerate(parents):
        step = _index(here, key, path) if isinstance(here, list) else key
        if isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[step]
        if not isinstance(here, (dict, list)):
            above = ".".join(keys[: depth + 1])
            raise TrimtabError(f"{path}: {above} is a value, {here!r}, and has no {keys[depth + 1]!r}")
    here[_index(here, last, path) if isinstance(here, list) else last] = value


def label(items: list[Any] | tuple[Any, ...], index: int) -> str:
    """An element's name where it has one of its own, else its number."""
    names = [item.get("name") if isinstance(item, Mapping) else None for item in items]
    name = names[index]
    return name if isinstance(name, str) and names.count(name) == 1 else str(index)


def _index(items: list[Any], key: str, path: str) -> int:
    labels = [label(items, index) for index in range(len(items))]
    numbers = [str(index) for index in range(len(items))]
    for names in (labels, numbers):
        if key in names:
            return names.index(key)
    hint = suggest(key, labels) if labels else "; it is empty"
    raise TrimtabError(f"{path}: the list has no element {key!r}{hint}")
