"""`trimtab run`: a recipe, a folder, a back end."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from trimtab.backends import Backend, RunRequest, RunResult, find_backend
from trimtab.cli.embedded import is_embedded, resolve
from trimtab.cli.folder import RunFolder
from trimtab.cli.progress import StepProgress
from trimtab.recipe import Recipe
from trimtab.recipe.inert import inert
from trimtab.recipe.tiny import sized_recipe


def run(
    name: str,
    overrides: Sequence[str],
    *,
    backend: str,
    tiny: bool,
    output: Path | None,
    fresh: bool,
    console: Console,
) -> None:
    """Train a recipe and say where the result is; the same command again continues an interrupted run.

    Raises:
        TrimtabError: bad input.
    """
    recipe = sized_recipe(name, overrides, tiny=tiny)
    start = find_backend(backend)
    path = output or Path("runs") / (recipe.name + ("-tiny" if tiny else ""))
    with RunFolder(path, recipe, fresh=fresh) as folder:
        if folder.finished:
            console.print(f"{folder.path} holds this run, finished. {_outcome(folder.summary())}", soft_wrap=True)
            console.print("Add --fresh to run it again, or --output for another folder.")
            return
        began = time.monotonic()
        result = _train(recipe, folder, start, console)
        summary = {"seconds": round(time.monotonic() - began, 1)} | dataclasses.asdict(result) | {"model": "model"}
        folder.finish(summary)
    for text in inert(recipe):
        console.print(f"DID NOT ACT: {text}", style="yellow", soft_wrap=True)
    steps = _count(recipe.training.steps, "step")
    console.print(f"Finished {steps} of {recipe.name}. {_outcome(summary)}", soft_wrap=True)
    console.print(f"Run folder: {folder.path}  (metrics.jsonl, recipe.yaml, model)", soft_wrap=True)
    console.print(f"Next: {_next(recipe, tiny)}", soft_wrap=True)


def _train(recipe: Recipe, folder: RunFolder, start: Backend, console: Console) -> RunResult:
    with StepProgress(recipe.training.steps, console) as progress:

        def record(step: int, metrics: Mapping[str, float]) -> None:
            folder.record(step, metrics)
            progress.update(step, metrics)

        def resume(step: int) -> None:
            folder.resume(step)
            progress.resume(step)
            if step:
                console.print(f"continuing after step {step}")

        data = recipe.data
        return start(
            RunRequest(
                recipe=recipe,
                recipe_file=folder.recipe_file,
                model=_local(recipe.model, "model", recipe, console),
                train=_local(data.train, "train", recipe, console),
                evaluation=data.evaluation and _local(data.evaluation, "evaluation", recipe, console),
                folder=folder.path,
                record=record,
                resume=resume,
            )
        )


def _local(reference: str, part: str, recipe: Recipe, console: Console) -> str:
    """An embedded model or data set as a path; anything else as it is."""
    if not is_embedded(reference):
        return reference
    return str(getattr(resolve(reference, seed=recipe.training.seed, notify=console.print), part))


def _outcome(summary: Mapping[str, float | None]) -> str:
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    text = f"{summary['seconds']:.0f} s."
    if before is None or after is None:
        return text
    return f"{text} Held-out accuracy {before:.3f} before, {after:.3f} after."


def _next(recipe: Recipe, tiny: bool) -> str:
    if recipe.name == "quickstart":
        return "trimtab run dapo --tiny, then `trimtab show dapo` for what it does at full size"
    return f"trimtab run {recipe.name} model=YOUR_MODEL" if tiny else f"trimtab show {recipe.name}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
