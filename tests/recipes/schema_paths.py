"""Every path that a recipe may state, read off the schema."""

from collections.abc import Iterator
from typing import Any

from trimtab.recipe import Recipe


def schema_paths() -> set[str]:
    """Paths of the values; an element of a list goes by the name of its method, and where there is none by `*`."""
    schema = Recipe.model_json_schema()
    return set(_walk(schema, schema["$defs"], ""))


def _walk(node: dict[str, Any], definitions: dict[str, Any], path: str) -> Iterator[str]:
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    options = [option for option in node.get("anyOf", node.get("oneOf", [])) if option.get("type") != "null"]
    if options:
        for option in options:
            yield from _walk(option, definitions, path)
    elif "properties" in node:
        for name, child in node["properties"].items():
            yield from _walk(child, definitions, f"{path}.{name}".lstrip("."))
    elif "prefixItems" in node:  # a pair of numbers
        yield path
    elif node.get("type") == "array":
        yield path  # an empty list
        for method in _methods(node["items"], definitions):
            name = method.get("properties", {}).get("name", {}).get("const", "*")
            yield from _walk(method, definitions, f"{path}.{name}")
    else:
        yield path


def _methods(items: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    options = items.get("oneOf", items.get("anyOf", [items]))
    return [definitions[option["$ref"].rpartition("/")[2]] if "$ref" in option else option for option in options]
