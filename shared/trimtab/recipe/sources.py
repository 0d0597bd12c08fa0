"""Where each value of a recipe comes from: `paper`, `code`, `secondary` or `project`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.recipe.paths import leaves
from trimtab.recipe.schema import Recipe

UNSOURCED = ("name", "title", "reference", "sources")
"""Keys that describe the recipe and set nothing."""


def source_of(recipe: Recipe, path: str) -> str:
    """The origin of a value: that of its own path, or of the nearest section above; "" where none is stated."""
    return next((recipe.sources[section] for section in _upwards(path) if section in recipe.sources), "")


def restate(sources: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The sources once values have changed: a new value is `project`, whatever the paper says of the old one.

    Args:
        sources: origins by path.
        before: the values by path that the sources speak of.
        after: the values now.

    Example:
        >>> restate({"a": "paper", "b.c": "code"}, {"a.x": 1, "a.y": 2, "b.c": 3}, {"a.x": 1, "a.y": 5})
        {'a': 'paper', 'a.y': 'project'}
    """
    gone = _sections(before) - _sections(after)
    kept = {path: origin for path, origin in sources.items() if gone.isdisjoint(_upwards(path))}
    changed = [path for path, value in after.items() if path not in before or before[path] != value]
    return kept | {path: "project" for path in changed if path.partition(".")[0] not in UNSOURCED}


def check_sources(recipe: Recipe, source: str) -> None:
    """A source names a value, or a section of values, that the recipe has."""
    known = _sections(path for path, _ in leaves(recipe.model_dump(exclude={"sources"})))
    for path in recipe.sources:
        if path not in known:
            raise TrimtabError(f"recipe {source}:\n  sources: {path!r} is not a key of this recipe")


def _sections(paths: Iterable[str]) -> set[str]:
    return {section for path in paths for section in _upwards(path)}


def _upwards(path: str) -> Iterator[str]:
    """A path, then each section that it lies in, the nearest first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
