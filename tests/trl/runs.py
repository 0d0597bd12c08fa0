"""Small runs under a recipe, and what is looked at afterwards."""

from pathlib import Path
from typing import Any

import torch

from tests.trl import tiny
from trl_ext import TrimtabConfig, TrimtabGRPOTrainer

OVERRIDES = (
    "rollout={engine: transformers, group_size: 4, prompts_per_step: 4, max_length: 6}",
    "optimizer={name: adamw, lr: 1.0e-2}",
    "training={mini_batch_size: 16, steps: 2}",
)
QUIET = {"use_cpu": True, "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True}


def arguments(folder: Path, *overrides: str, **changes: Any) -> TrimtabConfig:
    """Sixteen answers a step, one update on them; what is passed comes on top."""
    options = QUIET | {"save_strategy": "no"} | changes
    return TrimtabConfig(str(folder), recipe="quickstart", overrides=[*OVERRIDES, *overrides], **options)


def trainer(model: Any, config: TrimtabConfig, *, kind: type = TrimtabGRPOTrainer, **options: Any) -> Any:
    return tiny.trainer(kind, model, config, **options)


def trained(model: Any, config: TrimtabConfig, **options: Any) -> Any:
    run = trainer(model, config, **options)
    run.train()
    return run


def logs(run: Any) -> list[dict[str, Any]]:
    """The entries of the training steps."""
    return [entry for entry in run.state.log_history if "loss" in entry]


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Watching(TrimtabGRPOTrainer):
    """Keeps the inputs and the log-probs, with their gradient, of every forward that trains."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.seen = [*getattr(self, "seen", []), inputs]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if found[0].requires_grad:
            found[0].retain_grad()
            self.log_probs = [*getattr(self, "log_probs", []), found[0]]
        return found
