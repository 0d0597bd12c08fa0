"""Group advantages: by hand, against the statistics module, invariances, errors."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.advantages import BASELINES, SCALES, group_advantages

# Group 7: 1, 0, 0, 3: mean 1, deviations 0, -1, -1, 2, sample variance 6 / 3 = 2. Group 2: 2, 4: mean 3, variance 2.
REWARDS = torch.tensor([1.0, 2.0, 0.0, 0.0, 4.0, 3.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 2, 7, 7, 2, 7])
CENTRED = [0.0, -1.0, -1.0, -1.0, 1.0, 2.0]


def test_golden_none():
    assert_near(group_advantages(REWARDS, GROUPS, scale="none"), CENTRED, rtol=1e-12)


def test_golden_group_std():
    expected = [value / (math.sqrt(2) + 1e-6) for value in CENTRED]
    assert_near(group_advantages(REWARDS, GROUPS), expected, rtol=1e-12)
    expected = [value / (math.sqrt(2) + 0.5) for value in CENTRED]
    assert_near(group_advantages(REWARDS, GROUPS, eps=0.5), expected, rtol=1e-12)


def test_golden_leave_one_out():
    # Against the others: 1 - 3/3, 2 - 4, 0 - 4/3, 0 - 4/3, 4 - 2, 3 - 1/3.
    expected = [0.0, -2.0, -4 / 3, -4 / 3, 2.0, 8 / 3]
    assert_near(group_advantages(REWARDS, GROUPS, baseline="leave_one_out", scale="none"), expected, rtol=1e-12)


def test_golden_batch_std():
    # Of the raw rewards: mean 10/6, squares 30, variance (30 - 100/6) / 5 = 8/3; not of the centred ones (8/5).
    expected = [value / (math.sqrt(8 / 3) + 0.25) for value in CENTRED]
    assert_near(group_advantages(REWARDS, GROUPS, scale="batch_std", eps=0.25), expected, rtol=1e-12)


def test_golden_with_rewards_that_are_not_finite():
    # Group 0: 1, 3 remain, of 4. Group 1: one remains. Group 2: none.
    rewards = torch.tensor([1.0, torch.nan, 3.0, torch.inf, 5.0, -torch.inf, torch.nan], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    assert_near(group_advantages(rewards, groups, scale="none"), [-1.0, 0.0, 1.0, 0, 0, 0, 0])
    assert_near(
        group_advantages(rewards, groups, eps=0.5), [-1 / (math.sqrt(2) + 0.5), 0, 1 / (math.sqrt(2) + 0.5), 0, 0, 0, 0]
    )
    assert_near(group_advantages(rewards, groups, baseline="leave_one_out", scale="none"), [-2.0, 0, 2.0, 0, 0, 0, 0])
    # batch_std: of 1, 3, 5, so 2.
    assert_near(group_advantages(rewards, groups, scale="batch_std", eps=0.5), [-1 / 2.5, 0, 1 / 2.5, 0, 0, 0, 0])


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_a_group_without_a_spread_gets_exactly_0(baseline, scale):
    # 0.1 three times has a mean of 0.1 + 1e-17; over eps = 1e-6 and less that would be no zero. Also under a batch
    # standard deviation that is not 0 (https://github.com/huggingface/trl/pull/6365).
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 1e6, 1e6, 1e6], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    result = group_advantages(rewards, groups, baseline=baseline, scale=scale, eps=1e-30)
    assert (result[[0, 1, 2, 5, 6, 7]] == 0).all() and (result[3:5] != 0).all()
    # All equal, eps 0: 0 / 0 is 0.
    assert (group_advantages(torch.ones(4), torch.zeros(4), baseline=baseline, scale=scale, eps=1e-8) == 0).all()


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_fewer_than_two_finite_rewards_give_0(baseline, scale):
    for rewards in ([5.0], [5.0, torch.nan], [torch.nan, torch.inf], []):
        result = group_advantages(
            torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), baseline=baseline, scale=scale
        )
        assert result.shape == (len(rewards),) and (result == 0).all()


def test_dtypes():
    for dtype in (torch.int64, torch.bfloat16, torch.float16, torch.float32):
        result = group_advantages(REWARDS.to(dtype), GROUPS, scale="none")
        assert result.dtype == torch.float32
        assert_near(result, CENTRED)
    assert group_advantages(REWARDS, GROUPS).dtype == torch.float64
    assert not group_advantages(REWARDS.clone().requires_grad_(), GROUPS).requires_grad


def test_no_argument_is_changed():
    rewards, groups = REWARDS.clone(), GROUPS.clone()
    rewards[0] = torch.nan
    copy = rewards.clone()
    group_advantages(rewards, groups, scale="batch_std")
    torch.testing.assert_close(rewards, copy, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(groups, GROUPS)


REWARD = st.floats(-5, 5, width=32)
ANSWERS = st.lists(st.tuples(REWARD, st.integers(-2, 2)), min_size=1, max_size=16)


@settings(deadline=None, derandomize=True)
@given(ANSWERS, st.sampled_from(BASELINES), st.sampled_from(SCALES))
def test_equals_the_statistics_module(answers, baseline, scale):
    rewards = [reward for reward, _ in answers]
    expected = []
    for i, (reward, group) in enumerate(answers):
        mates = [r for r, g in answers if g == group]
        others = [r for j, (r, g) in enumerate(answers) if g == group and j != i]
        if not others:
            expected.append(0.0)
            continue
        centre = statistics.fmean(mates if baseline == "mean" else others)
        spread = {"group_std": mates, "batch_std": rewards, "none": None}[scale]
        expected.append((reward - centre) / (1 if spread is None else statistics.stdev(spread) + 0.1))
    result = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([group for _, group in answers]),
        baseline=baseline,
        scale=scale,
        eps=0.1,
    )
    assert_near(result, expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None, derandomize=True)
@given(ANSWERS, st.permutations(range(16)), st.sampled_from(SCALES), st.floats(-100, 100), st.floats(0.1, 10))
def test_order_offset_and_scale(answers, order, scale, offset, factor):
    rewards = torch.tensor([reward for reward, _ in answers], dtype=torch.float64)
    groups = torch.tensor([group for _, group in answers])
    result = group_advantages(rewards, groups, scale=scale, eps=0.0 if scale == "none" else 1e-2)
    order = torch.tensor([i for i in order if i < len(answers)])
    shuffled = group_advantages(rewards[order], groups[order], scale=scale, eps=0.0 if scale == "none" else 1e-2)
    assert_near(shuffled, result[order], rtol=1e-9, atol=1e-9)
    moved = group_advantages(rewards + offset, 10 - groups, scale=scale, eps=0.0 if scale == "none" else 1e-2)
    assert_near(moved, result, rtol=1e-6, atol=1e-6)
    scaled = group_advantages(rewards * factor, groups, scale="none")
    assert_near(scaled, group_advantages(rewards, groups, scale="none") * factor, rtol=1e-9, atol=1e-9)


@settings(deadline=None, derandomize=True)
@given(st.lists(REWARD, min_size=2, max_size=10))
def test_the_mean_baseline_is_leave_one_out_times_g_minus_1_over_g(rewards):
    x, one = torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64)
    share = (len(rewards) - 1) / len(rewards)
    left_out = group_advantages(x, one, baseline="leave_one_out", scale="none")
    assert_near(group_advantages(x, one, scale="none"), left_out * share, rtol=1e-9, atol=1e-9)
    assert_near(group_advantages(x, one).sum(), 0.0, atol=1e-6)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="^baseline: 'median' is unknown; one of mean, leave_one_out"):
        group_advantages(REWARDS, GROUPS, baseline="median")
    with pytest.raises(ValueError, match="^scale: 'group' is unknown; one of group_std, batch_std, none"):
        group_advantages(REWARDS, GROUPS, scale="group")
    for rewards, groups in ((REWARDS, GROUPS[:5]), (REWARDS[None], GROUPS[None]), (REWARDS, GROUPS[:, None])):
        with pytest.raises(ValueError, match="rewards and group_ids must both be"):
            group_advantages(rewards, groups)
