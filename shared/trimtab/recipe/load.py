"""From a name or a file to a checked `Recipe`."""

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trimtab.errors import TrimtabError
from trimtab.recipe.base import suggest
from trimtab.recipe.explain import explain
from trimtab.recipe.paths import assign, leaves
from trimtab.recipe.schema import Recipe
from trimtab.recipe.sources import UNSOURCED, check_sources, restate


def list_recipes() -> list[str]:
    """The names of the bundled recipes.

    Example:
        >>> "quickstart" in list_recipes()
        True
    """
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by its name or file, with some values replaced, checked whole.

    Args:
        name_or_path: a bundled recipe's name, or the path of a YAML file.
        overrides: `a.b.c=value` each, in order; the value is read as YAML. An element of a list goes by its name or
            number: `reward.overlong.buffer=512`.

    Returns:
        The recipe, frozen.

    Raises:
        TrimtabError: no such recipe, not YAML, or a key or value that is not allowed; names each with what is.

    Example:
        >>> load_recipe("dapo", ["objective.surrogate.clip_high=0.3"]).objective.surrogate.clip_high
        0.3
    """
    return build_recipe(parse(find(name_or_path)), overrides, source=str(name_or_path))


def build_recipe(tree: dict[str, Any], overrides: Sequence[str] = (), *, source: str) -> Recipe:
    """The recipe of a tree of plain values, with overrides; `source` names it in an error."""
    before = dict(leaves(tree))
    if isinstance(overrides, str):
        raise TrimtabError(f"overrides: {overrides!r} is a text; pass a list of them")
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise TrimtabError(f"{override!r} is not an override; write a.b.c=value")
        assign(tree, path.strip(), _yaml(text, override))
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise TrimtabError(f"recipe {source}:\n" + explain(error, tree)) from None
    except UnicodeEncodeError as error:  # "\ud800" is half a character
        raise TrimtabError(f"recipe {source}: {error}") from None
    stated, values = dict(leaves(tree)), dict(leaves(recipe.model_dump(exclude=set(UNSOURCED))))
    defaults = {path: "project" for path in values if path not in stated}
    recipe = recipe.model_copy(update={"sources": defaults | restate(recipe.sources, before, stated)})
    check_sources(recipe, source)
    return recipe


def find(name_or_path: str | Path) -> Path:
    """The file of a recipe."""
    text = str(name_or_path)
    looks_like_path = text.endswith((".yaml", ".yml")) or "/" in text
    try:
        path = Path(text).expanduser() if looks_like_path else recipe_folder() / f"{text}.yaml"
        if path.is_file():
            return path
        folder = path.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long, a home that nobody has
        raise TrimtabError(f"recipe {text}: {error}") from None
    if looks_like_path:
        raise TrimtabError(f"recipe {text}: {'it is a folder' if folder else 'there is no such file'}")
    raise TrimtabError(f"recipe {text!r} is unknown{suggest(text, list_recipes())}")


def parse(path: Path) -> dict[str, Any]:
    """The plain values of a recipe file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrimtabError(f"recipe {path}: not readable as UTF-8 text: {error}") from None
    tree = _yaml(text, f"recipe {path}")
    if not isinstance(tree, dict):
        raise TrimtabError(f"recipe {path}: a mapping of keys was expected, not {type(tree).__name__}")
    return tree


def dump(recipe: Recipe) -> str:
    """The recipe as YAML, whole, so that what ran can run again."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def recipe_folder() -> Path:
    """Where the bundled recipes lie: inside the package, or beside it in an editable install."""
    bundled = Path(str(files("trimtab"))) / "recipes"
    return bundled if bundled.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key that comes twice and a node inside itself, and reads 1e-6 as a number."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # whole nodes at once: then PyYAML finds that one holds itself

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            # A few lines of nested aliases spell gigabytes.
            raise yaml.constructor.ConstructorError(None, None, "an alias (*name) is not allowed in a recipe")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506, a subclass of the safe loader
    # PyYAML lets other errors through: for 2020-99-99, `!!bool 3`, a number of 5000 digits, lists 500 deep.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise TrimtabError(f"{source}: not readable as YAML: {error}") from None
