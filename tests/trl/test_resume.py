"""A run that is killed and started again ends where an uninterrupted one does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trl import runs, tiny
from trl_ext import TrimtabConfig, TrimtabGRPOTrainer
from trl_ext.resume import COMPLETE, last_checkpoint

SCRIPT = Path(__file__).with_name("killed.py")


def run_script(*arguments, kill_at=0):
    environment = os.environ | {"KILL_AT": str(kill_at)}
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], env=environment, timeout=300).returncode


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [6, 19], ids=["first-epoch", "second-epoch"])
def test_killed_in_mid_window(tmp_path, kill_at):
    """Windows of eight updates (four slices, two iterations), a checkpoint every third update, two windows an epoch."""
    model = tiny.save_model(tmp_path / "model")
    assert run_script(model, tmp_path / "whole") == 0
    assert run_script(model, tmp_path / "killed", kill_at=kill_at) == -signal.SIGKILL
    checkpoint = last_checkpoint(tmp_path / "killed")
    assert int(checkpoint.name.rpartition("-")[2]) % 8 != 0
    assert run_script(model, tmp_path / "killed") == 0
    whole, resumed = (torch.load(tmp_path / name / "weights.pt") for name in ("whole", "killed"))
    start = tiny.flat_weights(tiny.trainer(TrimtabGRPOTrainer, model, config(tmp_path)).model)
    assert (whole - start).abs().max() > 1e-3
    assert torch.equal(whole, resumed)


def config(tmp_path):
    overrides = ["rollout={engine: transformers, group_size: 4, prompts_per_step: 4, max_length: 6}"]
    overrides += ["training={mini_batch_size: 4, steps: 1}"]
    options = {"use_cpu": True, "report_to": "none", "gradient_checkpointing": False}
    return TrimtabConfig(str(tmp_path / "x"), recipe="quickstart", overrides=overrides, **options)


def test_a_finished_run_is_not_trained_on(tmp_path):
    """Killed between its last checkpoint and the end, or simply started again."""
    model = tiny.save_model(tmp_path / "model")
    first = runs.trained(model, runs.arguments(tmp_path / "run", save_strategy="steps", save_steps=2))
    again = runs.trainer(model, runs.arguments(tmp_path / "run", save_strategy="steps", save_steps=2))
    assert again.train(resume_from_checkpoint=True).global_step == 2 == again.state.global_step
    assert torch.equal(tiny.flat_weights(again.model), tiny.flat_weights(first.model))


@pytest.mark.slow
def test_the_command_killed_and_started_again(tmp_path):
    """`trimtab run` with four updates on a rollout, twice over it; killed while it trains."""
    sizes = ["training.mini_batch_size=64", "training.epochs_per_rollout=2", "training.steps=4"]
    command = [sys.executable, "-c", "from trimtab.cli.app import main; main()", "run", "quickstart", *sizes]
    command += ["training.checkpoint_every=1", "data.evaluation=null"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, "--output", str(whole)], check=True, timeout=300, stdout=subprocess.DEVNULL)
    process = subprocess.Popen([*command, "--output", str(killed)], stdout=subprocess.DEVNULL)
    metrics, deadline = killed / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    again = subprocess.run([*command, "--output", str(killed)], check=True, timeout=300, capture_output=True, text=True)
    assert "continuing after step" in again.stdout
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (whole, killed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    lines = [folder.joinpath("metrics.jsonl").read_text().count("\n") for folder in (whole, killed)]
    assert lines == [4, 4]


def test_only_whole_checkpoints_count(tmp_path):
    for step in (3, 20, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "weights").write_text("whole")
    for step in (3, 20):
        (tmp_path / f"checkpoint-{step}" / COMPLETE).write_text('{"weights": 5}')
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-20"
    (tmp_path / "checkpoint-20" / "weights").write_text("cut")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert last_checkpoint(tmp_path / "nothing") is None
