"""Checkpoints in the middle of a generation window: what TRL forgets, saved and restored."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput, get_last_checkpoint
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

WINDOW = "trimtab_window_{rank}.pt"
COMPLETE = "trimtab_complete"


class ResumableGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` that continues where it was: TRL samples new answers after a resume, and reshuffles the data.

    A checkpoint also holds the answers of the current window, the count of micro-steps and what a subclass returns
    from `extra_state`; a marker file, written last, tells a whole checkpoint from one that was cut off.
    """

    def extra_state(self) -> dict[str, Any]:
        """What a subclass keeps in a checkpoint: tensors, numbers, strings and containers of them."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what `extra_state` returned."""

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> TrainOutput:
        """As TRL's, but a run that its checkpoint shows finished is not trained on: TRL makes one update more."""
        checkpoint = (
            get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        )
        state_file = Path(checkpoint or "") / TRAINER_STATE_NAME
        if checkpoint and state_file.is_file():
            state = TrainerState.load_from_json(str(state_file))
            if 0 < self.args.max_steps <= state.global_step:
                self._load_from_checkpoint(str(checkpoint))
                self.state = state
                return TrainOutput(state.global_step, 0.0, {})
        return super().train(resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        state = {
            "world_size": self.args.world_size,
            "step": self._step,
            "buffer": self._buffered_inputs,
            "extra": self.extra_state(),
        }
        torch.save(state, folder / WINDOW.format(rank=self.args.process_index))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            sizes = {item.name: item.stat().st_size for item in folder.iterdir() if item.is_file()}
            (folder / COMPLETE).write_text(json.dumps(sizes))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        # Each epoch draws one permutation; a new process has drawn none yet.
        sampler = getattr(self, "_train_sampler", None)
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            for _ in range(int(self.state.epoch or 0)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        path = Path(checkpoint) / WINDOW.format(rank=self.args.process_index)
        if not path.is_file():  # a checkpoint of TRL's own trainer: continue as TRL does
            return
        state = torch.load(path, weights_only=True, map_location=self.accelerator.device)
        if state["world_size"] == self.args.world_size:
            self._step, self._buffered_inputs = state["step"], state["buffer"]
        self.load_extra_state(state["extra"])

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint of a folder that was written to its end, and whose files are still as long as then."""
    whole = [path.parent for path in Path(folder).glob(f"checkpoint-*/{COMPLETE}") if _is_whole(path)]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _is_whole(marker: Path) -> bool:
    try:
        sizes = json.loads(marker.read_text())
        return all((marker.parent / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
