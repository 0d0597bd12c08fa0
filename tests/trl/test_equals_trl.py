"""With a plain `GRPOConfig` the trainer is TRL's, bit for bit."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.trl import tiny
from trl_ext import TrimtabGRPOTrainer

TIMES = ("time", "runtime", "per_second")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_iterations": 2, "epsilon_high": 0.28, "mask_truncated_completions": True},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "gradient_accumulation_steps": 2},
        {"beta": 0.04, "steps_per_generation": 2, "scale_rewards": "batch"},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_ten_steps_end_in_the_same_weights_and_logs(tmp_path, changes):
    model = tiny.save_model(tmp_path / "model")
    runs = []
    for kind in (GRPOTrainer, TrimtabGRPOTrainer):
        run = tiny.trainer(kind, model, GRPOConfig(**tiny.arguments(tmp_path / kind.__name__, **changes)))
        run.train()
        logs = [{k: v for k, v in entry.items() if not any(t in k for t in TIMES)} for entry in run.state.log_history]
        runs.append((tiny.flat_weights(run.model), logs))
    start = tiny.flat_weights(
        torch.nn.ModuleList([tiny.trainer(GRPOTrainer, model, GRPOConfig(**tiny.arguments(tmp_path))).model])
    )
    assert not torch.equal(runs[0][0], start)
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
