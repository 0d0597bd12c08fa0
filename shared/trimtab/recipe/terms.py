"""The typed keys of the objective's methods, read off the cores' own signatures."""

from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

from trimtab.objective import Place, Term
from trimtab.recipe.base import Choice, Section


class MethodOf:
    """Type annotation: one method of a place, told by its `name`, with the keys of its core."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sections: list[Any] = [_section(self.place, term) for term in self.place.values()]
        if len(sections) < 2:
            return handler.generate_schema(sections[0] if sections else Section)
        return handler.generate_schema(Annotated[reduce(or_, sections), Field(discriminator="name")])


def _section(place: Place, term: Term) -> type[Section]:
    fields: dict[str, Any] = {"name": (Literal[term.name], ...)}
    fields |= {name: _key(term, name) for name in term.keys}
    if place.weighted:
        fields["coefficient"] = (float, ...)
    return create_model(f"{place.title}.{term.name}", __base__=Section, **fields)


def _key(term: Term, name: str) -> tuple[Any, Any]:
    """Type and default of one key; its bounds are the core's own, which `Objective` asks."""
    parameter = term.keys[name]
    default = ... if parameter.default is Term.REQUIRED else parameter.default
    if name in term.choices:
        return Annotated[str, Choice(term.choices[name])], default
    return parameter.annotation, default
