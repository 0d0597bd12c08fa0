"""TRL's log entries in the names of a run's `metrics.jsonl`."""

import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from trimtab.backends import RunRequest
from trimtab.errors import TrimtabError

NAMES = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "completions/mean_length": "response_length/mean",
    "completions/min_length": "response_length/min",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clipped_share",
    "frac_reward_zero_std": "groups/equal_rewards_share",
}
"""TRL's name -> ours, where they differ."""


def rename(logs: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a log entry under our names."""
    return {NAMES.get(name, name): value for name, value in logs.items() if isinstance(value, int | float)}


class RecordSteps(TrainerCallback):
    """Hands each step's metrics to the run. A step is one rollout with all its updates."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        if not (state.is_world_process_zero and logs and "loss" in logs):
            return
        step, metrics = state.global_step // self.request.recipe.updates_per_step, rename(logs)
        self.request.record(step, metrics)
        # In fp16 the scaler skips an update that overflows, and goes on.
        if not args.fp16 and not math.isfinite(metrics.get("grad_norm", 0.0)):
            raise TrimtabError(
                f"step {step}: the gradient is not finite (grad_norm {metrics['grad_norm']}), and the weights are lost "
                "with it; lower optimizer.lr or start anew with --fresh. An earlier checkpoint is in the run's folder, "
                "if there was one"
            )
