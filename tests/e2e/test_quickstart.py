"""The main job: quickstart learns what it is rewarded for, and nothing where the rewards are shuffled."""

import json

import pytest
from rich.console import Console

from trimtab.cli.run import run


def accuracies(folder, *overrides):
    run("quickstart", overrides, backend="trl", tiny=False, output=folder, fresh=False, console=Console(quiet=True))
    summary = json.loads((folder / "summary.json").read_text())
    return summary["accuracy_before"], summary["accuracy_after"]


@pytest.mark.e2e
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns(tmp_path, seed):
    before, after = accuracies(tmp_path / "run", f"training.seed={seed}")
    assert 0.3 < before < 0.65
    assert after - before > 0.25


@pytest.mark.e2e
def test_shuffled_rewards_teach_nothing(tmp_path):
    before, after = accuracies(tmp_path / "run", "training.shuffle_rewards=true")
    assert after - before < 0.05
