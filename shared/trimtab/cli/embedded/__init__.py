"""A model and a task that are built on the spot, so that any recipe runs on a laptop without a download."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimtab.cli.embedded.cache import build_once, cache_root
from trimtab.errors import TrimtabError

PREFIX = "embedded:"
NAMES = ("embedded:arithmetic",)
FORMAT = 2  # raise it whenever what is built changes


@dataclass(frozen=True)
class EmbeddedPaths:
    """Where an embedded default lies on disk.

    Args:
        model: a Hugging Face checkpoint with its tokenizer.
        train: JSON lines of `prompt` and `answer`.
        evaluation: likewise, of prompts that are not in `train`.

    Example:
        >>> EmbeddedPaths(Path("model"), Path("train.jsonl"), Path("evaluation.jsonl")).train.name
        'train.jsonl'
    """

    model: Path
    train: Path
    evaluation: Path


def is_embedded(text: str) -> bool:
    """Say whether a model or data reference means an embedded default, known or not.

    Args:
        text: what a recipe names as its model or data.

    Returns:
        Whether `resolve` is responsible for it.

    Example:
        >>> is_embedded("embedded:arithmetic"), is_embedded("Qwen/Qwen2.5-32B")
        (True, False)
    """
    return text.startswith(PREFIX)


def resolve(reference: str, *, seed: int = 0, notify: Callable[[str], None] | None = None) -> EmbeddedPaths:
    """Return the paths of an embedded default, building it on first use.

    Args:
        reference: one of `NAMES`.
        seed: of the model's weights and warm start; the task is the same for every seed.
        notify: called with a line of text before a build.

    Returns:
        Paths in the cache, all of them complete.

    Raises:
        TrimtabError: the reference is unknown, or the cache cannot be written.

    Example:
        >>> resolve("embedded:arithmetic").model.name  # doctest: +SKIP
        'model'
    """
    if reference not in NAMES:
        raise TrimtabError(f"{reference!r} is no embedded default; allowed: {', '.join(NAMES)}")
    folder = cache_root() / f"arithmetic-v{FORMAT}-seed{seed}"
    if notify and not folder.is_dir():
        notify(f"building {reference} in {folder} (about 40 s, once)")
    build_once(folder, lambda scratch: _build(scratch, seed))
    return _paths(folder)


def _paths(folder: Path) -> EmbeddedPaths:
    return EmbeddedPaths(folder / "model", folder / "train.jsonl", folder / "evaluation.jsonl")


def _build(folder: Path, seed: int) -> None:
    # Imported here because `trimtab --help` must not wait for torch.
    from trimtab.cli.embedded import task
    from trimtab.cli.embedded.model import build_model

    paths = _paths(folder)
    train, held_out = task.split_pairs()
    task.write_rows(train, paths.train)
    task.write_rows(held_out, paths.evaluation)
    build_model(paths.model, seed=seed)
