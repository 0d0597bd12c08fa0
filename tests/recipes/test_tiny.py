"""`--tiny`: the method stays the recipe's own, the sizes become those of the embedded model."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.recipe import list_recipes, load_recipe
from trimtab.recipe.load import build_recipe, find, parse
from trimtab.recipe.paths import leaves
from trimtab.recipe.sources import source_of
from trimtab.recipe.tiny import MAX_LENGTH, MODEL, ROWS, UPDATES, shrink

EACH = pytest.mark.parametrize("name", list_recipes())


def tiny(recipe, overrides=()):
    return build_recipe(shrink(recipe.model_dump(mode="json")), overrides, source="tiny")


@EACH
def test_the_method_stays_the_recipes_own(name):
    recipe = load_recipe(name)
    small = tiny(recipe)
    assert small.objective == recipe.objective
    assert small.advantage == recipe.advantage
    assert small.sampling == recipe.sampling
    assert [(reward.name, reward.weight) for reward in small.reward] == [(r.name, r.weight) for r in recipe.reward]
    assert small.training.epochs_per_rollout == recipe.training.epochs_per_rollout
    assert small.optimizer.weight_decay == recipe.optimizer.weight_decay
    assert small.rollout.temperature == recipe.rollout.temperature


@EACH
def test_the_sizes_are_those_of_the_embedded_model(name):
    recipe = load_recipe(name)
    small = tiny(recipe)
    assert {small.model, small.data.train, small.data.evaluation} == {MODEL}
    assert small.rollout.engine == "transformers" and small.precision.train == "fp32"
    assert small.rollout.max_length == MAX_LENGTH and small.rollout.group_size <= 8
    assert all(reward.max_length == MAX_LENGTH for reward in small.reward if reward.name == "overlong")
    assert small.rows_per_step == ROWS
    updates = recipe.updates_per_step // recipe.training.epochs_per_rollout
    assert small.updates_per_step // small.training.epochs_per_rollout == min(updates, UPDATES)


@EACH
def test_a_tree_as_it_was_parsed_shrinks_to_the_same_sizes(name):
    small = build_recipe(shrink(parse(find(name))), source="tiny")
    assert small.model_dump(exclude={"sources"}) == tiny(load_recipe(name)).model_dump(exclude={"sources"})


@settings(max_examples=100, deadline=None)
@given(data=st.data(), group_size=st.integers(2, 40), prompts=st.integers(1, 60), epochs=st.integers(1, 3))
def test_the_rows_divide_for_any_sizes(data, group_size, prompts, epochs):
    rows = group_size * prompts
    mini = data.draw(st.sampled_from([size for size in range(1, rows + 1) if rows % size == 0]))
    sizes = {"group_size": group_size, "prompts_per_step": prompts}
    recipe = load_recipe("quickstart", [f"rollout.{key}={value}" for key, value in sizes.items()]
                         + [f"training.mini_batch_size={mini}", f"training.epochs_per_rollout={epochs}"])  # fmt: skip
    small = tiny(recipe)
    assert small.rollout.group_size == min(group_size, 8)
    assert small.updates_per_step == min(rows // mini, UPDATES) * epochs
    # Not much is lost to the rounding, and whole groups are sampled.
    assert ROWS * 0.8 < small.rows_per_step <= ROWS
    assert small.rows_per_step % small.rollout.group_size == 0


@pytest.mark.parametrize("group_size", [3, 5, 6, 7])
@pytest.mark.parametrize("updates", [1, 2, 3, 4, 5])
def test_group_sizes_that_do_not_divide_the_rows(group_size, updates):
    recipe = load_recipe(
        "quickstart",
        [f"rollout.group_size={group_size}", f"rollout.prompts_per_step={updates}"]
        + [f"training.mini_batch_size={group_size}"],
    )
    small = tiny(recipe)
    assert small.rollout.group_size == group_size
    assert small.updates_per_step == min(updates, UPDATES)


def test_a_micro_batch_of_the_cluster_does_not_stay():
    assert tiny(load_recipe("dapo", ["training.micro_batch_size=512"])).training.micro_batch_size is None


def test_a_mini_batch_larger_than_the_rows_is_one_update():
    # No recipe: such a tree does not load. `shrink` alone must not divide by zero or make no update of it.
    tree = {"rollout": {"group_size": 4, "prompts_per_step": 2}, "training": {"mini_batch_size": 100}}
    assert shrink(tree)["training"]["mini_batch_size"] == ROWS


def test_overrides_come_after_the_sizes():
    small = tiny(load_recipe("dapo"), ["rollout.group_size=4", "training.steps=3", "data.train=other"])
    assert (small.rollout.group_size, small.training.steps, small.data.train) == (4, 3, "other")
    assert tiny(load_recipe("dapo")).data.train == MODEL  # the override stayed where it was made


def test_the_tree_that_is_shrunk_does_not_change():
    tree = parse(find("dapo"))
    before = copy.deepcopy(tree)
    shrink(tree)
    assert tree == before


@EACH
def test_a_size_that_changed_is_no_longer_the_papers(name):
    recipe = load_recipe(name)
    small = tiny(recipe)
    before, after = (dict(leaves(one.model_dump(mode="json", exclude={"sources"}))) for one in (recipe, small))
    changed = [path for path in after if after[path] != before.get(path)]
    assert "optimizer.warmup_steps" in changed
    assert {source_of(small, path) for path in changed} == {"project"}
    assert all(source_of(small, path) == source_of(recipe, path) for path in set(after) - set(changed))
