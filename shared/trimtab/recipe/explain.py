"""Validation errors in the words of a recipe: the key, its value, what is allowed."""

from typing import Any

from pydantic import ValidationError

from trimtab.recipe.base import suggest
from trimtab.recipe.paths import label

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
TYPES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "none_required": "null",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}


def explain(error: ValidationError, tree: Any) -> str:
    """One line for each thing that is wrong with a recipe's tree."""
    items = error.errors()
    return "\n".join(f"  {_line(item, tree)}" for item in items if not _follows(item, items))


def _follows(item: Any, items: list[Any]) -> bool:
    """Whether a list counts as too short only because an element of it is wrong."""
    depth = len(item["loc"])
    return item["type"] == "too_short" and any(
        other["loc"][:depth] == item["loc"] and len(other["loc"]) > depth for other in items
    )


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
    if kind == "union_tag_not_found":
        return f"{path}.name: must be given"
    if kind == "union_tag_invalid":
        tag = value["name"]
        return f"{path}.name: {tag!r} is not allowed{suggest(tag, _words(context['expected_tags']))}"
    if kind == "too_short":
        return f"{prefix}at least {context['min_length']} must be given"
    if kind in TYPES:
        return f"{prefix}{value!r} is not allowed; it must be {TYPES[kind]}"
    for word, text in BOUNDS.items():
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
        if isinstance(tree, (list, tuple)) and isinstance(step, int) and step < len(tree):
            path.append(label(tree, step))
            tree = tree[step]
        else:
            path.append(str(step))
            tree = tree.get(step) if isinstance(tree, dict) else None
    return path
