"""`trimtab run dapo` on a real model of 135M parameters. Optional: it needs a download of 93 MB, once."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.e2e import smollm

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/train_500.jsonl"  # where the project has data beside it
ON_A_LAPTOP = ["rollout.engine=transformers", "precision.train=fp32", "precision.rollout=auto"]
LEARNING_RATE = 1e-6


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return smollm.checkpoint()
    except smollm.Unavailable as error:
        pytest.skip(str(error))


def _run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train in `folder`/run; returns the metrics of each step."""
    command = [Path(sys.executable).with_name("trimtab"), "run", "dapo", "--output", folder / "run"]
    settings = {"OMP_NUM_THREADS": "2", "HF_HOME": str(folder / "huggingface")}
    done = subprocess.run(
        [*command, *ON_A_LAPTOP, *overrides], env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    broken = [(entry["step"], key) for entry in metrics for key, value in entry.items() if not math.isfinite(value)]
    assert not broken
    return metrics


@pytest.fixture(scope="module")
def additions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The run folder and the metrics of three steps of two updates each."""
    folder = tmp_path_factory.mktemp("additions")
    smollm.write_additions(folder / "additions.jsonl")
    metrics = _run(
        folder,
        f"model={model}",
        f"data.train={folder / 'additions.jsonl'}",
        "data.max_prompt_length=32",
        "rollout.group_size=8",
        "rollout.prompts_per_step=4",
        "rollout.max_length=3",
        "reward=[{name: math}]",  # no answer is long here: the reward is the accuracy
        "training.mini_batch_size=16",
        "training.micro_batch_size=8",
        "training.steps=3",
        f"optimizer.lr={LEARNING_RATE}",
        "optimizer.warmup_steps=0",
    )
    return folder / "run", metrics


def test_each_step_has_a_gradient(additions):
    _, metrics = additions
    assert [entry["step"] for entry in metrics] == [1, 2, 3]
    assert all(entry["grad_norm"] > 0 for entry in metrics), metrics


def test_a_few_shot_model_gets_some_additions_right_and_some_wrong(additions):
    _, metrics = additions
    assert all(0 < entry["reward/mean"] < 1 for entry in metrics), metrics
    assert all(entry["groups/equal_rewards_share"] < 1 for entry in metrics), metrics


def test_the_first_update_of_a_rollout_is_on_policy(additions):
    _, metrics = additions
    # The same weights twice in float32, and both forwards take eight rows: rounding is all that can differ.
    assert all(entry["on_policy_gap/max"] < 1e-5 for entry in metrics), metrics


def test_the_weights_move_by_more_than_their_decay(additions, model):
    run, _ = additions
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run / "model"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        moved = (after[name] - weight).abs()
        assert moved.isfinite().all(), name
        # AdamW moves a weight by about the learning rate at each update, its decay by a ten-millionth of the weight.
        assert moved.max() > LEARNING_RATE / 2, name


def test_the_run_folder_says_what_was_run(additions, model):
    run, _ = additions
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert recipe["model"] == str(model)
    assert recipe["rollout"]["engine"] == "transformers"
    assert (run / "summary.json").is_file()


@pytest.mark.skipif(not GSM8K.is_file(), reason="there is no shared/data/gsm8k/train_500.jsonl beside the project")
def test_prompts_of_gsm8k_run_a_step(model, tmp_path):
    metrics = _run(
        tmp_path,
        f"model={model}",
        f"data.train={GSM8K}",
        "data.prompt=question",
        "data.answer=answer",
        "data.max_prompt_length=64",
        "rollout.group_size=2",
        "rollout.prompts_per_step=2",
        "rollout.max_length=16",
        "reward.overlong.max_length=16",
        "reward.overlong.buffer=4",
        "training.mini_batch_size=4",
        "training.steps=1",
    )
    assert [entry["step"] for entry in metrics] == [1]
    assert (tmp_path / "run/model/model.safetensors").is_file()
