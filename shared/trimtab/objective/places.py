"""The places of an objective and what can stand in each: a new method is a core of its own and one line here.

The core's signature is the method's interface. Its positional arguments are the words of the batch that it reads, its
keyword-only arguments the keys of a recipe; the line here adds what a signature cannot say.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trimtab.aggregation import MODES
from trimtab.correction import BOUNDS, STATISTICS, importance_weights, rejection_mask
from trimtab.kl import ESTIMATORS, kl_penalty
from trimtab.policy_loss import cispo, gspo, gspo_token, minpro, ppo_clip, sapo
from trimtab.ratios import LEVELS

WORDS = frozenset(
    {"log_prob", "old_log_prob", "rollout_log_prob", "ref_log_prob", "response_mask", "advantages", "group_ids"}
)
"""What an adapter may put into a batch."""

ENGINE, UPDATE = frozenset({"engine"}), frozenset({"update"})
"""The two ratios: old/rollout and current/old. Their product, current/rollout, counts both."""


@dataclass(frozen=True)
class Term:
    """One method in its place: the core, the ratios it counts, the words that its keys choose from.

    `modes` are the aggregations under which it means what it says; `internal` keys are not a recipe's to set;
    `whole_row` says that a row repeats one loss on its tokens.
    """

    name: str
    core: Callable[..., Any]
    counts: frozenset[str] = frozenset()
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    internal: tuple[str, ...] = ()
    modes: tuple[str, ...] = MODES
    whole_row: bool = False
    REQUIRED: ClassVar[object] = inspect.Parameter.empty

    @property
    def reads(self) -> tuple[str, ...]:
        """The words of the batch that the core takes, in its order."""
        return tuple(p.name for p in self._parameters() if p.kind is not p.KEYWORD_ONLY)

    @property
    def reads_if_present(self) -> tuple[str, ...]:
        """Words that the core takes as an option."""
        return tuple(p.name for p in self._parameters() if p.kind is p.KEYWORD_ONLY and p.name in WORDS)

    @property
    def keys(self) -> dict[str, inspect.Parameter]:
        """The keys of a recipe that the core takes, with their types and defaults."""
        hidden = WORDS | set(self.internal)
        return {p.name: p for p in self._parameters() if p.kind is p.KEYWORD_ONLY and p.name not in hidden}

    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.core).parameters.values())


class Place(Mapping[str, Term]):
    """The methods that can stand in one place, by name.

    Example:
        >>> place = Place("surrogate")
        >>> place.add("ppo_clip", ppo_clip)
        >>> place.add("ppo_clip", ppo_clip)
        Traceback (most recent call last):
        ...
        ValueError: surrogate 'ppo_clip' is there already
    """

    def __init__(self, title: str, *, weighted: bool = False) -> None:
        self.title = title
        self.weighted = weighted  # whether each use has a coefficient
        self._terms: dict[str, Term] = {}

    def add(self, name: str, core: Callable[..., Any], **details: Any) -> None:
        """Add a method; a name that is taken, or an argument that no batch holds, is refused."""
        if name in self._terms:
            raise ValueError(f"{self.title} {name!r} is there already")
        term = Term(name, core, **details)
        if unknown := set(term.reads) - WORDS:
            raise ValueError(f"{self.title} {name!r} reads {sorted(unknown)}, but a batch holds {sorted(WORDS)}")
        if unknown := set(term.choices) - set(term.keys):
            raise ValueError(f"{self.title} {name!r} has choices for {sorted(unknown)}, which are not its keys")
        self._terms[name] = term

    def __getitem__(self, name: str) -> Term:
        if name not in self._terms:
            raise ValueError(f"{self.title}: {name!r} is unknown; one of {', '.join(self._terms)}")
        return self._terms[name]

    def __contains__(self, name: object) -> bool:
        return name in self._terms

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)


SURROGATES = Place("surrogate")
WEIGHTS = Place("weights")
MASKS = Place("masks")
PENALTIES = Place("penalties", weighted=True)

PER_ROW = ("seq-mean-token-mean",)
"""The modes for a loss that a row repeats on each token: any other would weigh an answer by its length."""

SURROGATES.add("ppo_clip", ppo_clip, counts=UPDATE)
SURROGATES.add("gspo", gspo, counts=UPDATE, modes=PER_ROW, whole_row=True)
SURROGATES.add("gspo_token", gspo_token, counts=UPDATE, modes=PER_ROW)
SURROGATES.add("cispo", cispo, counts=UPDATE)
SURROGATES.add("minpro", minpro, counts=UPDATE)
SURROGATES.add("sapo", sapo, counts=UPDATE)
WEIGHTS.add(
    "importance",
    importance_weights,
    counts=ENGINE,
    choices={"level": LEVELS, "bound": BOUNDS},
    internal=("mean",),
)
MASKS.add("rejection", rejection_mask, choices={"statistic": STATISTICS})
PENALTIES.add("kl", kl_penalty, choices={"estimator": ESTIMATORS})
