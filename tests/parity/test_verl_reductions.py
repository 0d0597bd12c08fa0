"""Our aggregation and advantages against verl's, in float64; and where ours differs on purpose."""

import numpy
import pytest
import torch

from tests.parity import verl_reference as verl
from tests.parity.verl_reference import assert_equal, value_and_gradient
from trimtab.advantages import group_advantages
from trimtab.aggregation import MODES, aggregate

pytestmark = pytest.mark.slow  # importing verl takes ten seconds

SEQUENCE_MODES = [mode for mode in MODES if mode.startswith("seq-mean")]
LENGTH = 20


@pytest.fixture(autouse=True, scope="module")
def needs_verl():
    verl.load("core_algos")


def theirs(mode, **options):
    scale = {"loss_scale_factor": LENGTH} if mode == "seq-mean-token-sum-norm" else {}
    return lambda batch: verl.load("core_algos").agg_loss(
        batch["advantages"], batch["response_mask"], mode, **scale | options
    )


def ours(mode, **options):
    constant = {"max_length": LENGTH} if mode == "seq-mean-token-sum-norm" else {}
    return lambda batch: aggregate(batch["advantages"], batch["response_mask"], mode=mode, **constant | options)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_equals_verl_on_the_batchs_own_denominators(mode):
    batch = verl.batch()
    expected = value_and_gradient(theirs(mode), batch, "advantages")
    assert expected[1].abs().max() > 1e-3
    assert_equal(value_and_gradient(ours(mode), batch, "advantages"), expected)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_aggregation_equals_verl_on_the_steps_denominators(mode, ranks):
    """verl multiplies by the ranks inside, ours leaves it to the adapter."""
    batch = verl.batch()
    step = {"batch_num_tokens": 97, "global_batch_size": 23, "dp_size": ranks}
    expected = value_and_gradient(theirs(mode, **step), batch, "advantages")
    share = ours(mode, num_tokens=97, num_sequences=23)
    assert_equal(value_and_gradient(lambda batch: ranks * share(batch), batch, "advantages"), expected)


@pytest.mark.parametrize("mode", MODES)
def test_two_micro_batches_of_both_add_up_to_the_step(mode):
    batch = verl.batch()
    whole = theirs(mode)(batch)
    tokens, rows = batch["response_mask"].sum().item(), batch["response_mask"].any(dim=1).sum().item()
    parts = [{name: value[half] for name, value in batch.items()} for half in (slice(0, 2), slice(2, None))]
    step = theirs(mode, batch_num_tokens=tokens, global_batch_size=rows)
    assert_equal(sum(step(part) for part in parts), whole)
    share = ours(mode, num_tokens=torch.tensor(tokens), num_sequences=torch.tensor(rows))
    assert_equal(sum(share(part) for part in parts), whole)


def test_verls_step_counts_fully_masked_rows_and_ours_does_not():
    """verl's trainer passes mini-batch size times group size; ours passes rows with a live token, 5 of these 6."""
    batch = verl.batch()
    expected = ours("seq-mean-token-mean")(batch)
    assert_equal(theirs("seq-mean-token-mean", global_batch_size=6)(batch), expected * 5 / 6)
    assert_equal(theirs("seq-mean-token-mean", global_batch_size=5)(batch), expected)
    assert_equal(ours("seq-mean-token-mean", num_sequences=6)(batch), expected * 5 / 6)


@pytest.mark.parametrize("mode", MODES)
def test_nan_under_the_mask_poisons_verls_means_over_rows_and_not_ours(mode):
    """R02: the sequence modes multiply by the mask, and 0 * NaN is NaN."""
    clean = verl.batch()
    expected = theirs(mode)(clean)
    batch = verl.spoilt(clean, clean["response_mask"] == 0, words=("advantages",))
    assert theirs(mode)(batch).isnan() == (mode in SEQUENCE_MODES)
    value, gradient = value_and_gradient(ours(mode), batch, "advantages")
    assert_equal(value, expected)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_is_nan_in_verl_and_zero_in_ours(mode):
    """R03: verl divides 0 by 0, except in token-sum; ours is 0 with a zero gradient."""
    batch = verl.batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    assert theirs(mode)(batch).isnan() == (mode != "token-sum")
    value, gradient = value_and_gradient(ours(mode), batch, "advantages")
    assert value == 0 and (gradient == 0).all()


def test_verls_dr_grpo_divides_by_the_padded_width_and_ours_asks_for_the_constant():
    """Unless loss_scale_factor is set, more padding means a smaller loss."""
    mode, batch = "seq-mean-token-sum-norm", verl.batch()
    padded = {name: torch.nn.functional.pad(value, (0, 7)) for name, value in batch.items()}
    narrow, wide = (theirs(mode, loss_scale_factor=None)(inputs) for inputs in (batch, padded))
    assert_equal(wide, narrow / 2)
    assert_equal(ours(mode)(padded), ours(mode)(batch))
    with pytest.raises(ValueError, match="max_length"):
        aggregate(batch["advantages"], batch["response_mask"], mode=mode)


GROUPS = ["b", "a", "b", "c", "a", "c", "b", "a"]
GROUP_IDS = torch.tensor([7, 3, 7, 9, 3, 9, 7, 3])
REWARDS = torch.tensor([1.0, 0.2, -0.7, 3.0, 0.9, 2.5, 0.1, 0.9], dtype=torch.float64)
MASK = (torch.arange(5) < torch.tensor([5, 2, 1, 4, 3, 5, 2, 1]).unsqueeze(1)).long()

ESTIMATORS = {
    "grpo": ("grpo", {}, {}),
    "grpo-eps": ("grpo", {"epsilon": 0.1}, {"eps": 0.1}),
    "grpo_vectorized": ("grpo_vectorized", {}, {}),
    "dr_grpo": ("grpo", {"norm_adv_by_std_in_grpo": False}, {"scale": "none"}),
    "dr_grpo_vectorized": ("grpo_vectorized", {"norm_adv_by_std_in_grpo": False}, {"scale": "none"}),
    "rloo": ("rloo", {}, {"baseline": "leave_one_out", "scale": "none"}),
    "rloo_vectorized": ("rloo_vectorized", {}, {"baseline": "leave_one_out", "scale": "none"}),
}


def verl_advantages(name, rewards, groups, **options):
    """verl takes the reward on the last token of each answer, and returns (B, T)."""
    mask = MASK[: len(groups)]
    last = torch.nn.functional.one_hot(mask.sum(dim=1) - 1, mask.shape[1]).bool()
    token_rewards = torch.where(last, rewards.unsqueeze(1), 0.0)
    estimator = verl.load("core_algos").get_adv_estimator_fn(name)
    return estimator(token_rewards, mask, index=numpy.array(groups, dtype=object), **options)[0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_equal_verl(name):
    their_name, their_options, our_options = ESTIMATORS[name]
    expected = verl_advantages(their_name, REWARDS, GROUPS, **their_options)
    found = group_advantages(REWARDS, GROUP_IDS, **our_options)
    # verl's vectorised GRPO takes mean and standard deviation in float32, whatever it is given.
    assert_equal(found.unsqueeze(1) * MASK, expected, atol=1e-6 if their_name == "grpo_vectorized" else 1e-10)
    assert expected.abs().max() > 0.5


SINGLE = {
    "grpo": ("grpo", {}, {}, 3.0 / (1 + 1e-6)),
    "dr_grpo": ("grpo", {"norm_adv_by_std_in_grpo": False}, {"scale": "none"}, 3.0),
    "rloo": ("rloo", {}, {"baseline": "leave_one_out", "scale": "none"}, 3.0),
    "rloo_vectorized": ("rloo_vectorized", {}, {"baseline": "leave_one_out", "scale": "none"}, 0.0),
}


@pytest.mark.parametrize("name", SINGLE)
def test_an_answer_alone_gets_its_raw_reward_in_verl_and_zero_in_ours(name):
    """There is nothing to compare it with. verl's own vectorised RLOO agrees with ours."""
    their_name, their_options, our_options, expected = SINGLE[name]
    rewards = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
    value = verl_advantages(their_name, rewards, ["a", "a", "b"], **their_options)[2, 0]
    assert value.item() == pytest.approx(expected, abs=1e-6)  # verl adds its eps to a float32 1
    assert group_advantages(rewards, torch.tensor([0, 0, 1]), **our_options)[2] == 0


def test_equal_rewards_are_rounding_noise_over_eps_in_verl_and_exactly_zero_in_ours():
    """A mean of equal float32 numbers may miss them by an ulp, which eps makes visible."""
    rewards = torch.full((7,), 0.7)
    noise = verl_advantages("grpo", rewards, ["a"] * 7).abs().max()
    assert 1e-3 < noise < 1
    assert (group_advantages(rewards, torch.zeros(7, dtype=torch.long)) == 0).all()


def test_a_nan_reward_poisons_its_group_in_verl_and_only_itself_in_ours():
    """Ours leaves the reward out of its group, and gives it 0."""
    rewards = torch.tensor([1.0, float("nan"), 0.0, 5.0, 4.0], dtype=torch.float64)
    expected = verl_advantages("grpo", rewards, ["a", "a", "a", "b", "b"])[:, 0]
    assert expected[:3].isnan().all() and expected[3:].isfinite().all()
    found = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1]))
    assert found[1] == 0
    others = verl_advantages("grpo", rewards[[0, 2, 3, 4]], ["a", "a", "b", "b"])[:, 0]
    assert_equal(found[[0, 2, 3, 4]], others)
