"""A run that kills itself in update KILL_AT, if set: `killed.py MODEL FOLDER`. Run again, it continues."""

import os
import signal
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.trl import tiny  # noqa: E402
from trl_ext import TrimtabConfig, TrimtabGRPOTrainer  # noqa: E402
from trl_ext.resume import last_checkpoint  # noqa: E402

model_path, folder = sys.argv[1], Path(sys.argv[2])


class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == int(os.environ["KILL_AT"]) > 0:
            os.kill(os.getpid(), signal.SIGKILL)


config = TrimtabConfig(
    str(folder),
    recipe="quickstart",
    overrides=[
        "rollout={engine: transformers, group_size: 4, prompts_per_step: 4, max_length: 6}",
        "training={mini_batch_size: 4, epochs_per_rollout: 2, steps: 3}",
        "optimizer={name: adamw, lr: 1.0e-2}",
    ],
    use_cpu=True,
    report_to="none",
    gradient_checkpointing=False,
    disable_tqdm=True,
    save_strategy="steps",
    save_steps=3,
)
# Four prompts a window and eight in all: the second epoch begins after two windows.
run = tiny.trainer(TrimtabGRPOTrainer, model_path, config, train_dataset=tiny.prompts(8), callbacks=[Kill()])
checkpoint = last_checkpoint(folder)
run.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
torch.save(tiny.flat_weights(run.model), folder / "weights.pt")
