"""No silent no-op: the code says of every key of a recipe where it acts, and of no key that does not exist."""

import dataclasses

import pytest
from trl import GRPOConfig

from tests.recipes.schema_paths import schema_paths
from trimtab.recipe.frameworks import OTHERS
from trimtab.recipe.sources import UNSOURCED
from trl_ext.translate import ARGUMENTS, ELSEWHERE, REPLACED, RIVALS

PATHS = schema_paths()
CLAIMED = {key for key, _ in ARGUMENTS.values()} | set(ELSEWHERE)


def upwards(path):
    parts = path.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


SECTIONS = set().union(*map(upwards, PATHS))


def test_the_walk_over_the_schema_finds_what_is_known_to_be_there():
    assert {"model", "rollout.group_size", "objective.surrogate.clip_high", "reward.overlong.buffer"} <= PATHS
    assert {"objective.weights.importance.level", "objective.penalties.kl.coefficient", "sampling.curriculum"} <= PATHS
    assert "objective" not in PATHS and "sampling.dynamic" not in PATHS


def test_the_trl_adapter_says_where_each_key_acts():
    # An argument acts on its own key; only what is read elsewhere may stand for a whole section.
    silent = [
        path
        for path in PATHS
        if path.partition(".")[0] not in UNSOURCED and path not in CLAIMED and not upwards(path) & set(ELSEWHERE)
    ]
    assert not silent


def test_the_trl_adapter_claims_no_key_that_does_not_exist():
    assert CLAIMED <= SECTIONS


def test_the_keys_that_set_nothing_are_the_descriptive_ones():
    assert {path.partition(".")[0] for path in PATHS} - {key.partition(".")[0] for key in CLAIMED} == set(UNSOURCED)


def test_the_arguments_named_are_trls():
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert set(ARGUMENTS) | set(REPLACED) | set(RIVALS) <= names
    assert len({*ARGUMENTS, *REPLACED, *RIVALS}) == len(ARGUMENTS) + len(REPLACED) + len(RIVALS)
    assert set(RIVALS.values()) <= SECTIONS


def test_the_frameworks_own_values_are_given_for_keys_that_exist():
    assert set(OTHERS) <= SECTIONS
    assert all(set(others) == {"TRL", "veRL"} for others in OTHERS.values())


@pytest.mark.parametrize(
    ("path", "argument", "stated"),
    [
        ("objective.surrogate.clip_low", "epsilon", "0.2 (epsilon)"),
        ("objective.surrogate.clip_high", "epsilon_high", "0.2 (epsilon_high unset)"),
        ("objective.surrogate.dual_clip", "delta", "none (delta)"),
        ("objective.aggregation.mode", "loss_type", "token-mean (loss_type dapo), over the generation batch"),
        ("objective.penalties", "beta", "none (beta 0)"),
        ("advantage.scale", "scale_rewards", "group_std (scale_rewards)"),
        ("rollout.group_size", "num_generations", "8 (num_generations)"),
        ("rollout.temperature", "temperature", "1.0"),
        ("rollout.top_p", "top_p", "1.0"),
        ("optimizer.lr", "learning_rate", "0.000001"),
        ("optimizer.weight_decay", "weight_decay", "0.0"),
        ("optimizer.warmup_steps", "warmup_steps", "0, in updates"),
    ],
)
def test_what_is_said_of_trl_is_what_trl_does(path, argument, stated):
    expected = {
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "loss_type": "dapo",
        "beta": 0.0,
        "scale_rewards": "group",
        "num_generations": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "learning_rate": 1e-6,
        "weight_decay": 0.0,
        "warmup_steps": 0,
    }
    fields = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    assert fields[argument] == expected[argument]
    assert OTHERS[path]["TRL"] == stated
