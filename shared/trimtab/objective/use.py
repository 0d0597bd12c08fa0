"""A method in use: a term with the values that a recipe gives its keys."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.objective.places import WORDS, Place, Term

Batch = Mapping[str, Tensor]


class Use:
    """A term of a place, its keys filled in; calling it runs the core on a batch.

    Raises:
        ValueError: an unknown key, or a key without a default that is missing.
    """

    def __init__(self, place: Place, node: Mapping[str, Any], label: str) -> None:
        options = dict(node)
        self.term: Term = place[str(options.pop("name", None))]
        self.coefficient = float(options.pop("coefficient", 1.0)) if place.weighted else 1.0
        self.label = label
        if unknown := set(options) - set(self.term.keys):
            raise ValueError(f"{label}: unknown {sorted(unknown)}; allowed: {', '.join(self.term.keys)}")
        self.values = {name: options.get(name, key.default) for name, key in self.term.keys.items()}
        if missing := [name for name, value in self.values.items() if value is Term.REQUIRED]:
            raise ValueError(f"{label}: {', '.join(missing)} must be given")
        if not self.coefficient > 0:
            raise ValueError(f"{label}: coefficient: {self.coefficient} is not allowed; above 0, or leave it out")
        self._try_values()

    def __call__(self, batch: Batch, **more: Any) -> Any:
        """Run the core on the words that it reads."""
        words = [batch[word] for word in self.term.reads]
        optional = {word: batch[word] for word in self.term.reads_if_present if batch.get(word) is not None}
        return self.term.core(*words, **(self.values | optional | more))

    def _try_values(self) -> None:
        """Let the core itself judge its values, now and not at the first batch: it has the only list of bounds."""
        try:
            self({word: torch.ones(1, 1) for word in WORDS})
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.label}: {error}") from None

    def __str__(self) -> str:
        return self.label


def read_uses(place: Place, nodes: Sequence[Mapping[str, Any]]) -> list[Use]:
    """The methods that a recipe puts into a place; a name that comes twice is numbered."""
    uses: list[Use] = []
    for node in nodes:
        name = str(node.get("name"))
        number = 1 + sum(use.term.name == name for use in uses)
        uses.append(Use(place, node, f"{place.title}/{name}" + (f"_{number}" if number > 1 else "")))
    return uses
