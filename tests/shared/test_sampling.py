"""Informative groups: by hand, on the raw score, against a dictionary, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.advantages import group_advantages
from trimtab.rewards import overlong_penalty
from trimtab.sampling import keep_informative_groups


def kept(scores, groups, dtype=torch.float32):
    result = keep_informative_groups(torch.tensor(scores, dtype=dtype), torch.tensor(groups, dtype=torch.int64))
    assert result.dtype == torch.bool
    return result.tolist()


def test_golden_groups():
    # Group 7 has both answers, 3 only wrong ones, 5 only right ones, 9 a single one; rows come in any order.
    scores = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    groups = [7, 3, 5, 7, 3, 5, 9]
    assert kept(scores, groups) == [True, False, False, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_scores_may_be_of_any_dtype(dtype):
    assert kept([1, 0, 0, 0], [4, 4, 2, 2], dtype) == [True, True, False, False]


def test_the_raw_score_decides_and_not_the_shaped_reward():
    # https://github.com/NVIDIA-NeMo/RL/issues/2431: all wrong, set apart by the overlong penalty alone. Such
    # groups destroyed a policy within 40 steps.
    raw = torch.zeros(4)
    shaped = raw + overlong_penalty(torch.tensor([100, 16384, 18432, 20480]), max_length=20480, buffer=4096)
    assert_near(shaped, [0.0, 0.0, -0.5, -1.0])
    group = torch.zeros(4, dtype=torch.int64)
    assert not keep_informative_groups(raw, group).any()
    assert keep_informative_groups(shaped, group).all()  # what the filter must not be given
    assert group_advantages(shaped, group).ne(0).any()


def test_a_group_is_judged_by_its_own_spread():
    # https://github.com/huggingface/trl/pull/6365: under batch scaling the flag came from the batch's deviation. Each
    # group is alone: one that is all right stays out beside one that is all wrong, whatever scales the advantage.
    scores, groups = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    assert scores.std() > 0
    assert not keep_informative_groups(scores, groups).any()
    for scale in ("group_std", "batch_std", "none"):
        assert (group_advantages(scores, groups, scale=scale) == 0).all()


def test_a_small_difference_is_a_difference():
    assert kept([0.1, 0.1, 0.1], [0, 0, 0]) == [False] * 3  # a deviation by rounding would be above 0
    assert kept([1e8, 1e8 + 8], [0, 0]) == [True] * 2
    assert kept([-1.0, -2.0, 1.0, -1.0], [0, 0, 1, 1]) == [True] * 4


def test_a_score_that_is_not_finite_is_ignored():
    nan, inf = math.nan, math.inf
    for bad in (nan, inf, -inf):
        assert kept([bad, 1.0, 0.0], [0, 0, 0]) == [True] * 3  # the two that remain differ
        assert kept([bad, 1.0, 1.0], [0, 0, 0]) == [False] * 3
        assert kept([bad, 1.0], [0, 0]) == [False] * 2  # fewer than two finite
        assert kept([bad, bad], [0, 0]) == [False] * 2
    assert kept([nan, 0.0, 1.0, 0.0], [0, 0, 1, 1]) == [False, False, True, True]


def test_no_rows_are_no_groups():
    assert kept([], []) == []


@settings(deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, -0.5, math.nan, math.inf]), st.integers(-3, 3)), min_size=1, max_size=12
    )
)
def test_equals_a_dictionary_of_groups(rows):
    seen: dict[int, set[float]] = {}
    for score, group in rows:
        seen.setdefault(group, set()).update({score} if math.isfinite(score) else ())
    scores, groups = zip(*rows, strict=True)
    assert kept(scores, groups) == [len(seen[group]) > 1 for group in groups]


def test_no_argument_is_changed_and_nothing_carries_a_gradient():
    scores, groups = torch.tensor([1.0, math.nan, 0.0], requires_grad=True), torch.tensor([0, 0, 0])
    versions = scores._version, groups._version
    assert not keep_informative_groups(scores, groups).requires_grad
    assert (scores._version, groups._version) == versions


@pytest.mark.parametrize(("scores", "groups"), [((4,), (3,)), ((2, 2), (2, 2)), ((2, 2), (2,)), ((), ())])
def test_a_wrong_shape_is_refused(scores, groups):
    with pytest.raises(ValueError, match=r"^scores and group_ids must both be \(B,\)"):
        keep_informative_groups(torch.zeros(scores), torch.zeros(groups, dtype=torch.int64))
