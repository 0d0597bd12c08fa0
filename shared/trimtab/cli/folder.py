"""The folder of a run: what it was asked, what came of it, and whether it is finished."""

import fcntl
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from trimtab.errors import TrimtabError
from trimtab.recipe import Recipe
from trimtab.recipe.load import dump, parse
from trimtab.recipe.paths import leaves

MARK = ".trimtab-run"  # what only a run's folder holds; locked while a process runs there
PROGRESS = ("metrics.jsonl", "evaluation.json", "summary.json", "model")
WRITTEN = (*PROGRESS, "README.md")  # beside recipe.yaml
ABOUT = ("title", "reference", "sources")  # of a recipe: a run does not depend on them


class RunFolder:
    """`recipe.yaml`, `metrics.jsonl`, checkpoints and the model of one run; a context, since it locks the folder.

    Args:
        path: the folder; made if it is not there.
        recipe: the resolved recipe of the run.
        fresh: delete what an earlier run wrote.

    Raises:
        TrimtabError: the folder holds another run, or something that is no run.
    """

    def __init__(self, path: Path, recipe: Recipe, *, fresh: bool = False) -> None:
        self.path = path
        self.recipe_file, self.metrics_file = path / "recipe.yaml", path / "metrics.jsonl"
        self.summary_file = path / "summary.json"
        try:
            self._open(recipe, fresh)
        except OSError as error:
            raise TrimtabError(f"--output: {path} cannot be used: {error}") from None

    def _open(self, recipe: Recipe, fresh: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise TrimtabError(f"--output: {self.path} is a file")
        mark = self.path / MARK
        if self.path.is_dir() and not mark.is_file() and any(self.path.iterdir()):
            raise TrimtabError(f"--output: {self.path} is not empty and holds no run; name another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(mark)
        try:
            if fresh:
                self._clear()
            elif self._begun():
                self._check_same(recipe)
            _write(self.recipe_file, dump(recipe))
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.summary_file.is_file()

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step; JSON has no NaN, so that a number that is none is null."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | numbers, allow_nan=False) + "\n")

    def resume(self, step: int) -> None:
        """Forget the metrics of steps after this one: they are about to be made again."""
        lines = self.metrics_file.read_text(encoding="utf-8").splitlines() if self.metrics_file.is_file() else []
        kept = [line for line in lines if _step(line) <= step]
        _write(self.metrics_file, "".join(f"{line}\n" for line in kept))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the run as finished."""
        _write(self.summary_file, json.dumps(summary, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        """What `finish` was given."""
        result: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        return result

    def _begun(self) -> bool:
        """Whether there is anything that another recipe must not continue."""
        made = [self.path / name for name in PROGRESS] + list(self.path.glob("checkpoint-[0-9]*"))
        return any(item.is_dir() or item.is_file() and item.stat().st_size > 0 for item in made)

    def _check_same(self, recipe: Recipe) -> None:
        there, here = _settings(parse(self.recipe_file)), _settings(recipe.model_dump(mode="json"))
        changed = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
        if changed:
            lines = [f"  {key}: {there.get(key)!r} there, {here.get(key)!r} now" for key in changed]
            raise TrimtabError(
                f"--output: {self.path} holds another run:\n" + "\n".join(lines) + "\nName another folder, or add "
                "--fresh to replace it"
            )

    def _clear(self) -> None:
        """Delete what a run wrote, all but its recipe: whoever is killed on the way can call again."""
        for item in [*self.path.glob("checkpoint-[0-9]*"), *(self.path / name for name in WRITTEN)]:
            if item.is_dir():
                shutil.rmtree(item)
            else:
                item.unlink(missing_ok=True)


def _locked(mark: Path) -> IO[str]:
    """The mark, opened and locked: the lock goes with the process, however it ends."""
    file = mark.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise TrimtabError(f"--output: another process is running in {mark.parent}") from None
    return file


def _write(path: Path, text: str) -> None:
    """All of it or nothing: a run may be killed at any moment."""
    scratch = _scratch(path)
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in leaves(tree) if path.partition(".")[0] not in ABOUT}


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line that was cut off
        return math.inf
