"""Every bundled recipe: it loads, says what it is, and gives the origin of what it states."""

import re

import pytest
import yaml

from trimtab.recipe import Recipe, list_recipes, load_recipe
from trimtab.recipe.load import build_recipe, dump, find, parse
from trimtab.recipe.paths import leaves
from trimtab.recipe.sources import UNSOURCED, check_sources, restate, source_of

SPECIFICATION = """
name: dapo
title: DAPO, Qwen2.5-32B, mathematics
reference: {arxiv: "2503.14476"}
model: Qwen/Qwen2.5-32B
data: {train: BytedTsinghua-SIA/DAPO-Math-17k, prompt: prompt, answer: answer, max_prompt_length: 2048}
reward:
  - {name: math, weight: 1.0}
  - {name: overlong, max_length: 20480, buffer: 4096}
advantage: {name: group, baseline: mean, scale: group_std}
objective:
  old_log_prob: recompute            # recompute (verl calls it decoupled) | bypass (rollout log-probs are the anchor)
  surrogate: {name: ppo_clip, clip_low: 0.2, clip_high: 0.28}
  weights: []                        # e.g. {name: importance, level: token, bound: truncate, high: 2.0}
  masks: []                          # e.g. {name: rejection, statistic: sequence_geometric, low: 0.99, high: 1.01}
  penalties: []                      # e.g. {name: kl, estimator: k3, coefficient: 0.001}
  aggregation: {mode: token-mean}
rollout: {engine: vllm, group_size: 16, prompts_per_step: 512, temperature: 1.0, top_p: 1.0, max_length: 20480}
sampling: {dynamic: {metric: accuracy, max_batches: 10}, curriculum: null}
training: {mini_batch_size: 512, epochs_per_rollout: 1, steps: 1000, seed: 0}
optimizer: {name: adamw, lr: 1.0e-6, weight_decay: 0.1, warmup_steps: 20, max_grad_norm: 1.0}
schedules: {}                        # path of a value above -> a schedule
moe: {routing_replay: none}          # none | R2 | R3
precision: {train: bf16, rollout: bf16, lm_head: fp32, kv_cache: auto}
sources: {objective.surrogate.clip_high: paper, optimizer.weight_decay: secondary}
"""
"""The recipe format as it is documented: it must go on loading as it stands."""

EACH = pytest.mark.parametrize("name", list_recipes())


def test_the_recipes_are_found():
    assert {"dapo", "quickstart"} <= set(list_recipes())


@EACH
def test_a_recipe_is_named_after_its_file(name):
    assert load_recipe(name).name == name == find(name).stem


@EACH
def test_a_recipe_opens_with_what_was_run_and_how_to_start(name):
    lines = find(name).read_text(encoding="utf-8").splitlines()
    header = [line for line in lines[: lines.index(f"name: {name}")] if line]
    assert len(header) >= 2 and all(line.startswith("# ") for line in header), header
    text = " ".join(line.removeprefix("# ") for line in header)
    assert re.search(rf"Start: trimtab run {name}\b", text), text
    # Where it was run, and for whatever mirrors a paper also what was not: no one may take a recipe for a result.
    assert re.search(r"\bCPU", text), text
    assert load_recipe(name).model.startswith("embedded:") or "not run" in text, text


@EACH
def test_whatever_a_recipe_states_has_a_source(name):
    recipe, tree = load_recipe(name), parse(find(name))
    stated = [path for path, _ in leaves({key: node for key, node in tree.items() if key not in UNSOURCED})]
    assert stated
    # An empty list or mapping chooses nothing.
    missing = [path for path, value in leaves(tree) if path in stated and value != {} and not source_of(recipe, path)]
    assert not missing


@EACH
def test_no_source_speaks_of_a_key_that_is_not_there(name):
    recipe = load_recipe(name)
    check_sources(recipe, name)
    known = {path for path, _ in leaves(recipe.model_dump(exclude={"sources"}))}
    assert all(any(f"{path}.".startswith(f"{stated}.") for path in known) for stated in recipe.sources)


@EACH
@pytest.mark.parametrize("overrides", [[], ["rollout.top_p=0.9", "training.micro_batch_size=1", "optimizer.lr=1e-7"]])
def test_what_is_dumped_loads_as_the_same_recipe(name, overrides, tmp_path):
    recipe = load_recipe(name, overrides)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
    assert dump(load_recipe(path)) == dump(recipe)


def test_the_documented_example_loads():
    recipe = build_recipe(yaml.safe_load(SPECIFICATION), source="specification")
    assert recipe.objective.surrogate.clip_high == 0.28
    assert recipe.optimizer.lr == 1e-6
    assert recipe.reward[1].buffer == 4096
    assert recipe.updates_per_step == 16  # 512 x 16 answers in mini-batches of 512


def test_the_documented_keys_are_all_there_are():
    assert set(Recipe.model_fields) == set(yaml.safe_load(SPECIFICATION))


def test_a_source_holds_for_what_lies_below_and_the_nearest_one_wins():
    recipe = load_recipe("dapo")
    assert source_of(recipe, "objective.surrogate.clip_high") == "paper"  # objective: paper
    assert source_of(recipe, "optimizer.lr") == "paper"
    assert source_of(recipe, "optimizer.weight_decay") == "secondary"
    assert source_of(recipe, "schedules") == ""


def test_an_override_takes_the_paper_off_its_value_alone():
    recipe = load_recipe("dapo", ["objective.surrogate.clip_high=0.3", "reward.1.buffer=5", "name=mine"])
    assert source_of(recipe, "objective.surrogate.clip_high") == "project"
    assert source_of(recipe, "reward.overlong.buffer") == "project"
    assert source_of(recipe, "objective.surrogate.clip_low") == "paper"
    assert source_of(recipe, "reward.overlong.max_length") == "paper"
    assert "name" not in recipe.sources


def test_an_override_with_the_same_value_keeps_its_source():
    assert load_recipe("dapo", ["objective.surrogate.clip_high=0.28"]) == load_recipe("dapo")


def test_the_sources_of_what_an_override_removes_go_with_it():
    recipe = load_recipe("dapo", ["reward=[{name: math}]"])
    assert "reward.overlong.buffer" not in recipe.sources
    assert recipe.sources["reward"] == "paper"


def test_restate_keeps_a_source_of_a_default_that_no_one_stated():
    assert restate({"a.default": "code", "a": "paper"}, {"a.x": 1}, {"a.x": 1}) == {"a.default": "code", "a": "paper"}
