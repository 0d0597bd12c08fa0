"""The base of every section of a recipe: unknown keys are refused, with the nearest one that exists."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """A section of a recipe. Frozen; a key that no code reads does not exist, and `true` or `"1"` is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, node: Any) -> Any:
        if isinstance(node, dict):
            unknown = [str(key) for key in node if key not in cls.model_fields]
            if unknown:
                raise ValueError("; ".join(f"unknown key {key!r}{suggest(key, cls.model_fields)}" for key in unknown))
        return node


def suggest(word: object, allowed: Iterable[object]) -> str:
    """The end of an error message: the nearest allowed word, and all of them.

    Example:
        >>> suggest("clip_hihg", ["clip_low", "clip_high"])
        '; did you mean clip_high? Allowed: clip_low, clip_high'
    """
    names = [str(name) for name in allowed]
    if not names:
        return "; none is available in this version"
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(str(word).casefold(), folded, n=1, cutoff=0.6)
    listed = f"llowed: {', '.join(names)}"
    return f"; did you mean {folded[near[0]]}? A{listed}" if near else f"; a{listed}"


class Choice:
    """Type annotation: one of these words.

    Example:
        >>> from typing import Annotated
        >>> from pydantic import TypeAdapter
        >>> TypeAdapter(Annotated[str, Choice(("mean", "none"))]).validate_python("none")
        'none'
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.words))
