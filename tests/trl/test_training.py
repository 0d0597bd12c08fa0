"""Whole runs of the trainer under a recipe: against TRL's own, split in other ways, and on two ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.trl import tiny
from trl_ext import TrimtabConfig, TrimtabGRPOTrainer

ROLLOUT = "rollout={engine: transformers, group_size: 4, prompts_per_step: 4, max_length: 6}"
OPTIMIZER = "optimizer={name: adamw, lr: 1.0e-2}"
QUIET = {"use_cpu": True, "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True}


def run_recipe(model_path, folder, *overrides, kind=TrimtabGRPOTrainer, **arguments):
    config = TrimtabConfig(
        str(folder),
        recipe="quickstart",
        overrides=[ROLLOUT, OPTIMIZER, *overrides],
        save_strategy="no",
        **QUIET,
        **arguments,
    )
    run = tiny.trainer(kind, model_path, config)
    run.train()
    return run


@pytest.mark.parametrize(
    ("loss_type", "mode", "updates"),
    [("dapo", "{mode: token-mean}", 1), ("grpo", "{mode: seq-mean-token-mean}", 2)],
)
def test_a_run_of_ours_follows_a_run_of_trl(model_path, tmp_path, loss_type, mode, updates):
    """TRL's sampling, our advantages and loss, TRL's weights at the end. dapo's denominator is the generation batch's
    in TRL, so that only with one update a rollout it is the update's own."""
    options = {
        "per_device_train_batch_size": 16 // updates,
        "steps_per_generation": updates,
        "loss_type": loss_type,
        "epsilon_high": 0.28,
        "max_steps": 3 * updates,
        "lr_scheduler_type": "constant",
        "seed": 0,
    }
    theirs = tiny.trainer(GRPOTrainer, model_path, GRPOConfig(**tiny.arguments(tmp_path / "trl", **options)))
    theirs.train()
    ours = run_recipe(
        model_path,
        tmp_path / "ours",
        f"training={{mini_batch_size: {16 // updates}, steps: 3}}",
        "advantage={name: group, eps: 1.0e-4}",
        f"objective.aggregation={mode}",
    )
    assert (tiny.flat_weights(theirs.model) - tiny.flat_weights(start(model_path))).abs().max() > 1e-2
    torch.testing.assert_close(tiny.flat_weights(ours.model), tiny.flat_weights(theirs.model), rtol=0, atol=1e-5)


def test_micro_batches_do_not_change_the_run(model_path, tmp_path):
    weights = [
        tiny.flat_weights(
            run_recipe(
                model_path,
                tmp_path / str(rows),
                f"training={{mini_batch_size: 16, micro_batch_size: {rows}, steps: 3}}",
            ).model
        )
        for rows in (16, 8, 2)
    ]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(weights[2], weights[0], rtol=0, atol=2e-5)


def test_first_update_of_a_rollout_is_on_policy_and_later_ones_are_not(model_path, tmp_path):
    run = run_recipe(model_path, tmp_path, "training={mini_batch_size: 8, steps: 2}", logging_steps=1)
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert logs[0]["surrogate/ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert logs[0]["on_policy_gap/max"] < 1e-5
    assert all(entry["grad_norm"] > 0 for entry in logs)
    assert logs[0]["kl/mean"] < 1e-9 < logs[1]["kl/mean"]
    assert logs[1]["surrogate/ratio/max"] > 1.001


def test_the_reference_is_used_where_a_penalty_asks_for_it(model_path, tmp_path):
    run = run_recipe(
        model_path,
        tmp_path,
        "training={mini_batch_size: 8, steps: 2}",
        "objective.penalties=[{name: kl, estimator: k3, coefficient: 0.5}]",
    )
    assert run.ref_model is not None
    assert run.state.log_history[-2]["penalties/kl/mean"] > 0


def test_shuffled_rewards_stay_within_their_groups(model_path, tmp_path):
    class Watching(TrimtabGRPOTrainer):
        def _shuffled(self, rewards):
            self.before, self.after = rewards, super()._shuffled(rewards)
            return self.after

    run = run_recipe(
        model_path, tmp_path, "training={mini_batch_size: 16, steps: 1, shuffle_rewards: true}", kind=Watching
    )
    before, after = run.before.view(-1, 4), run.after.view(-1, 4)
    assert not torch.equal(before, after)
    torch.testing.assert_close(before.sort(dim=1).values, after.sort(dim=1).values)


@pytest.mark.slow
def test_two_ranks_train_as_one(model_path, tmp_path):
    """Answers are given, so that only the split over ranks differs."""
    script = Path(__file__).with_name("fixed_answers.py")
    weights = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        subprocess.run([*command, str(script), model_path, str(folder)], check=True, timeout=300, cwd=tmp_path)
        weights.append(torch.load(folder / "weights.pt"))
    assert (weights[0] - tiny.flat_weights(start(model_path))).abs().max() > 1e-2
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=2e-5)


def start(model_path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path)
