"""What the command asks of a back end: an adapter is found by name, and never imported from here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.recipe import Recipe

GROUP = "trimtab.backends"


@dataclass(frozen=True)
class RunRequest:
    """One run of a recipe.

    Args:
        recipe: the resolved recipe; `recipe_file` is the same, in the run's folder.
        model: folder or name of the model to start from.
        train: file or name of the training data.
        evaluation: the same for the held-out data, or None.
        folder: where checkpoints and the model go.
        record: takes the metrics of a step, as (step, metrics).
        resume: takes the step that the run continues after; 0 for a new run.
    """

    recipe: "Recipe"
    recipe_file: Path
    model: str
    train: str
    evaluation: str | None
    folder: Path
    record: Callable[[int, Mapping[str, float]], None]
    resume: Callable[[int], None]


@dataclass(frozen=True)
class RunResult:
    """How a run ended: the model's folder, and the held-out accuracy before and after, where it was measured."""

    model: Path
    accuracy_before: float | None = None
    accuracy_after: float | None = None


Backend = Callable[[RunRequest], RunResult]


def find_backend(name: str) -> Backend:
    """The `run` of an installed back end.

    Raises:
        TrimtabError: no back end of this name, or its framework is not installed.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise TrimtabError(f"back end {name!r} is unknown; installed: {', '.join(sorted(found)) or 'none'}")
    try:
        backend: Backend = found[name].load()
    except ImportError as error:
        raise TrimtabError(f"back end {name!r} cannot start: {error}; pip install 'trimtab[{name}]'") from error
    return backend
