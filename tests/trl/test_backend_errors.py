"""`trimtab run` with what cannot be had: one message, exit code 2, no traceback."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.trl import tiny
from trimtab.backends import RunRequest
from trimtab.errors import TrimtabError
from trimtab.recipe import load_recipe
from trimtab.recipe.load import dump
from trl_ext.backend import run
from trl_ext.logs import RecordSteps

SIZES = ("rollout={engine: transformers, group_size: 4, prompts_per_step: 4, max_length: 6}", "data.evaluation=null")
TRAINING = "training={mini_batch_size: 8, steps: 2, checkpoint_every: 1}"


def request(tmp_path, model, *overrides, train=None):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe("quickstart", [*SIZES, TRAINING, *overrides])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(dump(recipe))
    steps = []
    asked = RunRequest(
        recipe=recipe,
        recipe_file=folder / "recipe.yaml",
        model=str(model),
        train=str(train or data),
        evaluation=None,
        folder=folder,
        record=lambda step, metrics: steps.append((step, dict(metrics))),
        resume=lambda step: None,
    )
    return asked, steps


def test_it_runs(tmp_path):
    asked, steps = request(tmp_path, tiny.save_model(tmp_path / "model"))
    result = run(asked)
    assert [step for step, _ in steps] == [1, 2]
    assert {"reward/mean", "loss", "kl/mean", "response_length/mean", "grad_norm"} <= set(steps[0][1])
    assert (result.model / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "damage", ["no folder", "no config", "bad config", "no weights", "bad weights", "no tokenizer"]
)
def test_a_model_that_cannot_be_read(tmp_path, damage):
    tiny.save_model(tmp_path / "model")
    kind, _, part = damage.partition(" ")
    names = {"config": "config.json", "weights": "model.safetensors", "tokenizer": "tokenizer.json"}
    model = tmp_path / ("nowhere" if part == "folder" else "model")
    if part in names:
        path = model / names[part]
        path.unlink() if kind == "no" else path.write_text("{broken")
    asked, _ = request(tmp_path, model)
    with pytest.raises(TrimtabError, match="^model: ") as error:
        run(asked)
    assert str(model) in str(error.value)


def test_an_engine_that_is_not_here(tmp_path):
    asked, _ = request(tmp_path, tiny.save_model(tmp_path / "model"), "rollout.engine=vllm")
    with pytest.raises(TrimtabError, match="^rollout.engine: vllm is not installed"):
        run(asked)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked, _ = request(tmp_path, tiny.save_model(tmp_path / "model"))
    with pytest.raises(TrimtabError, match="one process"):
        run(asked)


def test_fewer_prompts_than_a_step_takes(tmp_path):
    rows = tmp_path / "few.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    asked, steps = request(tmp_path, tiny.save_model(tmp_path / "model"), train=rows)
    with pytest.raises(TrimtabError, match="prompts_per_step: 4 prompts make a step, but the data has 3"):
        run(asked)
    assert steps == []


def test_fp16_does_not_act_on_a_cpu(tmp_path):
    asked, _ = request(tmp_path, tiny.save_model(tmp_path / "model"), "precision.train=fp16")
    with pytest.raises(TrimtabError, match="precision.train: fp16"):
        run(asked)


def test_weights_that_are_not_finite(tmp_path):
    """As after a step with far too large a learning rate: what the sampler says of it names no cause."""
    path = tiny.save_model(tmp_path / "model")
    model = Qwen3ForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    model.save_pretrained(path)
    asked, _ = request(tmp_path, path)
    with pytest.raises(TrimtabError, match="step 1: the model's weights are not finite"):
        run(asked)


def test_a_gradient_that_is_not_finite_ends_the_run():
    seen = []
    asked = SimpleNamespace(record=lambda step, metrics: seen.append(step), recipe=SimpleNamespace(updates_per_step=2))
    state = SimpleNamespace(is_world_process_zero=True, global_step=6)
    lost = {"loss": 0.1, "grad_norm": float("nan")}
    with pytest.raises(TrimtabError, match="step 3: the gradient is not finite"):
        RecordSteps(asked).on_log(SimpleNamespace(fp16=False), state, None, lost)
    RecordSteps(asked).on_log(SimpleNamespace(fp16=True), state, None, lost)  # the scaler skips that update
    assert seen == [3, 3]
