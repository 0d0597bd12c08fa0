"""The folder of a run: what it was asked, what came of it, and whether it is finished."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.recipe import Recipe
from trimtab.recipe.load import dump, parse
from trimtab.recipe.paths import leaves

WRITTEN = ("recipe.yaml", "metrics.jsonl", "evaluation.json", "summary.json", "model", "README.md")


class RunFolder:
    """`recipe.yaml`, `metrics.jsonl`, checkpoints and the model of one run.

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
        if path.exists() and not path.is_dir():
            raise TrimtabError(f"--output: {path} is a file")
        if fresh and self.recipe_file.is_file():
            self._clear()
        if self.recipe_file.is_file():
            self._check_same(recipe)
        elif path.is_dir() and any(path.iterdir()):
            raise TrimtabError(f"--output: {path} is not empty and holds no run; name another folder")
        path.mkdir(parents=True, exist_ok=True)
        _write(self.recipe_file, dump(recipe))

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.summary_file.is_file()

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def resume(self, step: int) -> None:
        """Forget the metrics of steps after this one: they are about to be made again."""
        lines = self.metrics_file.read_text().splitlines() if self.metrics_file.is_file() else []
        kept = [line for line in lines if _step(line) <= step]
        _write(self.metrics_file, "".join(f"{line}\n" for line in kept))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the run as finished."""
        _write(self.summary_file, json.dumps(summary, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        """What `finish` was given."""
        result: dict[str, Any] = json.loads(self.summary_file.read_text())
        return result

    def _check_same(self, recipe: Recipe) -> None:
        there = dict(leaves(parse(self.recipe_file)))
        here = dict(leaves(recipe.model_dump(mode="json")))
        changed = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
        if changed:
            lines = [f"  {key}: {there.get(key)!r} there, {here.get(key)!r} now" for key in changed]
            raise TrimtabError(
                f"--output: {self.path} holds another run:\n" + "\n".join(lines) + "\nName another folder, or add "
                "--fresh to replace it"
            )

    def _clear(self) -> None:
        for item in [self.path / name for name in WRITTEN] + list(self.path.glob("checkpoint-*")):
            if item.is_dir():
                shutil.rmtree(item)
            else:
                item.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    """All of it or nothing: a run may be killed at any moment."""
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line that was cut off
        return math.inf
