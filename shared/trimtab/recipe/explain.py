"""Validation errors in the words of a recipe: the key, its value, what is allowed."""

from typing import Any

from pydantic import ValidationError

from trimtab.recipe.base import suggest


def explain(error: ValidationError, tree: Any) -> str:
    """One line for each thing that is wrong with a recipe's tree."""
    return "\n".join(f"  {_line(item, tree)}" for item in error.errors())


def _line(item: Any, tree: Any) -> str:
    path = ".".join(_path(item["loc"], tree))
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    prefix = f"{path}: " if path else ""
    if kind == "missing":
        return f"{prefix}must be given"
    if kind == "value_error":
        return prefix + str(context["error"])
    if kind == "literal_error":
        return f"{prefix}{value!r} is not allowed{suggest(value, _words(context['expected']))}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = value.get("name") if isinstance(value, dict) else value
        allowed = _words(context.get("expected_tags", "")) or ["see the documentation"]
        return f"{prefix}name {tag!r} is not allowed{suggest(tag, allowed)}"
    if kind == "too_short":
        return f"{prefix}at least {context['min_length']} must be given"
    bounds = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for word, text in bounds.items():
        if word in context:
            return f"{prefix}{value!r} is not allowed; it must be {text} {context[word]}"
    return f"{prefix}{value!r} is not allowed; {item['msg'][:1].lower()}{item['msg'][1:]}"


def _words(text: str) -> list[str]:
    return [word.strip(" '") for word in text.replace(" or ", ", ").split(",") if word.strip(" '")]


def _path(location: tuple[int | str, ...], tree: Any) -> list[str]:
    """The path as the user wrote it: without the tags that a choice between methods adds."""
    path: list[str] = []
    for step in location:
        if isinstance(tree, dict) and step not in tree and step == tree.get("name"):
            continue
        if isinstance(tree, dict):
            tree = tree.get(step)
        elif isinstance(tree, (list, tuple)) and isinstance(step, int) and step < len(tree):
            tree = tree[step]
        path.append(str(step))
    return path
