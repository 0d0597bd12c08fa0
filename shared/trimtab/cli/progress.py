"""The progress of a run: a bar on a terminal, a few lines elsewhere."""

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SHOWN = {"reward/mean": "reward", "kl/mean": "KL", "surrogate/clip/mean": "clipped"}
LINES = 10


class StepProgress:
    """Shows reward, KL, share of clipped tokens and the time left.

    Args:
        total: steps of the run.
        console: where to.
    """

    def __init__(self, total: int, console: Console) -> None:
        self.total, self.console = total, console
        self.started, self.first = time.monotonic(), 0
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=total, numbers="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()

    def resume(self, step: int) -> None:
        """Start after this step."""
        self.first, self.started = step, time.monotonic()
        self.progress.update(self.task, completed=step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        numbers = "  ".join(f"{label} {metrics[name]:.3g}" for name, label in SHOWN.items() if name in metrics)
        self.progress.update(self.task, completed=step, numbers=numbers)
        if not self.console.is_terminal and (step == self.total or step % math.ceil(self.total / LINES) == 0):
            left = (time.monotonic() - self.started) / max(step - self.first, 1) * (self.total - step)
            self.console.print(f"step {step}/{self.total}  {numbers}  {left:.0f} s left", soft_wrap=True)
