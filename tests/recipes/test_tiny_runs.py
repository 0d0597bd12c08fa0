"""Every bundled recipe trains two steps on the embedded model, through the command's own code."""

import json

import pytest
from rich.console import Console
from safetensors.torch import load_file

from trimtab.cli.embedded import resolve
from trimtab.cli.run import run
from trimtab.recipe import list_recipes

ACTS = {
    "qwen3-gspo": lambda step: step["surrogate/clip/mean"] > 0.01,
    "minimax-m1-cispo": lambda step: step["surrogate/weight/max"] > 1.05 and step["surrogate/weight/min"] < 0.95,
    "minpro": lambda step: step["surrogate/ratio/mean"] < 0.99,
    "dapo": lambda step: step["surrogate/clip/mean"] > 0,
    "tis": lambda step: (
        step["weights/importance/ratio/count"] == step["tokens/count"] and 0.99 < step["ess/mean"] < 1.0001
    ),
    "icepop": lambda step: step["weights/importance/outside/mean"] < 0.01,
    "mis": lambda step: step["weights/importance/ratio/count"] == step["tokens/count"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list_recipes())
def test_two_steps(tmp_path, name):
    folder, quiet = tmp_path / "run", Console(quiet=True)
    changes = ["training.steps=2", "optimizer.warmup_steps=0", "data.evaluation=null"]
    run(name, changes, backend="trl", tiny=True, output=folder, fresh=False, console=quiet)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert {"reward/mean", "loss", "kl/mean", "response_length/mean", "grad_norm"} <= set(step)
        assert step["grad_norm"] > 0
        assert step["on_policy_gap/max"] < 1e-5  # the first update's ratio is 1
        assert step["groups/equal_rewards_share"] < 1  # some groups have mixed rewards
        assert step["mismatch/abs_diff/max"] < 1e-3
    assert ACTS.get(name, bool)(steps[-1])
    before = load_file(resolve("embedded:arithmetic").model / "model.safetensors")
    after = load_file(folder / "model" / "model.safetensors")
    assert all((before[key] != after[key]).any() for key in before)
