"""Log ratios at the five levels: by hand, against plain Python, gradients, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.ratios import LEVELS, log_ratio, log_weight


def weight(ratios, level, mask=None):
    """exp(log_weight) of a row of ratios, each given as new = log(ratio) - 1 against old = -1."""
    new = torch.tensor([ratios], dtype=torch.float64).log() - 1
    mask = torch.ones(new.shape) if mask is None else torch.tensor([mask])
    return torch.where(mask.bool(), log_weight(new, torch.full_like(new, -1.0), mask, level=level).exp(), 0.0)


def test_golden_log_ratio():
    new = torch.tensor([[-1.0, -2.0, torch.nan, -3.0]])
    old = torch.tensor([[-1.5, -0.5, -1.0, -torch.inf]])
    # -1 + 1.5; -2 + 0.5; removed; masked
    assert_near(log_ratio(new, old, torch.tensor([[1, 1, 1, 0]])), [[0.5, -1.5, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.9, 1.2, 0.5, 1.1]),
        ("sequence_product", [0.594] * 4),  # 0.9 * 1.2 = 1.08, * 0.5 = 0.54, * 1.1 = 0.594
        ("sequence_geometric", [0.594**0.25] * 4),
        ("prefix_product", [0.9, 1.08, 0.54, 0.594]),
        # Smallest earlier ratio, at most 1: 1, 0.9, 0.9, 0.5. An inclusive prefix would give 0.81, 1.08, 0.25, 0.55.
        ("prefix_min", [0.9, 1.08, 0.45, 0.55]),
    ],
)
def test_golden_levels(level, expected):
    assert_near(weight([0.9, 1.2, 0.5, 1.1], level), [expected], rtol=1e-12)


def test_golden_prefix_min_where_no_earlier_ratio_is_below_1():
    # The empty prefix counts as 1, so that 3 and 2 do not enter as a minimum of 2.
    assert_near(weight([3.0, 2.0, 4.0], "prefix_min"), [[3.0, 2.0, 4.0]], rtol=1e-12)
    assert_near(weight([3.0, 0.5, 4.0, 0.8, 2.0], "prefix_min"), [[3.0, 0.5, 2.0, 0.4, 1.0]], rtol=1e-12)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.5, 0, 3.0, 0.9, 0]),
        ("sequence_product", [1.35, 0, 1.35, 1.35, 0]),  # 0.5 * 3 * 0.9
        (
            "sequence_geometric",
            [1.35 ** (1 / 3), 0, 1.35 ** (1 / 3), 1.35 ** (1 / 3), 0],
        ),  # over three tokens, not five
        ("prefix_product", [0.5, 0, 1.5, 1.35, 0]),
        ("prefix_min", [0.5, 0, 1.5, 0.45, 0]),  # not 0.1 * 3: the masked token is no part of the prefix
    ],
)
@pytest.mark.parametrize("removed", [False, True])
def test_golden_levels_over_the_live_tokens_only(level, expected, removed):
    """Tokens 1 and 4 are masked, or live with a log-prob that is not finite; both are out of every statistic."""
    new = torch.tensor([[0.5, 0.1, 3.0, 0.9, 7.0]], dtype=torch.float64).log()
    old, mask = torch.zeros_like(new), torch.tensor([[1, 0, 1, 1, 0]])
    if removed:
        new[0, 1], old[0, 4], mask = torch.nan, torch.inf, torch.ones(1, 5)
    result = log_weight(new, old, mask, level=level)
    assert result[0, 1] == 0 and result[0, 4] == 0
    live = torch.tensor([True, False, True, True, False])
    assert_near(result[0, live].exp(), torch.tensor(expected)[live].double(), rtol=1e-6)


def test_no_level_is_clamped():
    # 300 tokens at 0.7, and their inverse: 0.7^300 is far below what float32 holds, its logarithm is not.
    for sign in (1, -1):
        new = torch.full((1, 300), sign * math.log(0.7), dtype=torch.float64)
        product = log_weight(new, torch.zeros_like(new), torch.ones(1, 300), level="sequence_product")
        assert_near(product[0, 0], sign * 300 * math.log(0.7), rtol=1e-12)
    new = torch.tensor([[100.0, -100.0]])
    assert_near(log_ratio(new, torch.zeros(1, 2), torch.ones(1, 2)), [[100.0, -100.0]])


def test_the_product_grows_with_the_length_and_the_geometric_mean_does_not():
    for length in (10, 1000):
        new = torch.full((1, length), 0.005, dtype=torch.float64)
        levels = {level: log_weight(new, torch.zeros_like(new), torch.ones(1, length), level=level) for level in LEVELS}
        assert_near(levels["sequence_product"][0, 0], 0.005 * length, rtol=1e-9)
        assert_near(levels["sequence_geometric"][0, 0], 0.005, rtol=1e-9)


TOKEN = st.tuples(st.floats(-3, 3), st.booleans())


@settings(deadline=None, derandomize=True)
@given(st.lists(TOKEN, min_size=1, max_size=12), st.sampled_from(LEVELS))
def test_equals_a_loop_over_the_live_tokens(tokens, level):
    live = [value for value, keep in tokens if keep]
    expected, seen = [], []
    for value, keep in tokens:
        if not keep:
            expected.append(0.0)
            continue
        expected.append(
            {
                "token": value,
                "sequence_product": sum(live),
                "sequence_geometric": sum(live) / len(live),
                "prefix_product": sum(seen) + value,
                "prefix_min": min([0.0, *seen]) + value,
            }[level]
        )
        seen.append(value)
    new = torch.tensor([[value for value, _ in tokens]], dtype=torch.float64)
    mask = torch.tensor([[keep for _, keep in tokens]])
    assert_near(log_weight(new, torch.zeros_like(new), mask, level=level), [expected], rtol=1e-9, atol=1e-12)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8), st.sampled_from(LEVELS))
def test_the_prefix_weight_never_exceeds_the_tokens_own(values, level):
    new = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones(new.shape)
    smallest = log_weight(new, torch.zeros_like(new), mask, level="prefix_min")
    assert (smallest <= new + 1e-12).all()
    # What a level is of one policy against another, it is against itself: nothing.
    assert (log_weight(new, new, mask, level=level) == 0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_gradcheck_in_both_arguments(level):
    generator = torch.Generator().manual_seed(1)
    new, old = (torch.randn(3, 5, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]])
    assert torch.autograd.gradcheck(lambda new, old: log_weight(new, old, mask, level=level), (new, old))


def test_gradients_by_hand():
    # d/d new of the sum over three live tokens. product: each token enters 3 values; geometric: 3 * 1/3;
    # prefix_product: token s enters the values of s and after; prefix_min of (-0.5, 0.2, -0.9): token 0 is the minimum
    # before 1 and 2 and its own; the last enters its own only.
    expected = {
        "token": [1.0, 1.0, 1.0],
        "sequence_product": [3.0, 3.0, 3.0],
        "sequence_geometric": [1.0, 1.0, 1.0],
        "prefix_product": [3.0, 2.0, 1.0],
        "prefix_min": [3.0, 1.0, 1.0],
    }
    for level, gradient in expected.items():
        new = torch.tensor([[-0.5, 0.2, -0.9, 9.0]], requires_grad=True)
        old = torch.zeros(1, 4, requires_grad=True)
        log_weight(new, old, torch.tensor([[1, 1, 1, 0]]), level=level).sum().backward()
        assert_near(new.grad, [[*gradient, 0.0]])
        assert_near(old.grad, [[*(-g for g in gradient), 0.0]])


def test_an_unknown_level_is_refused_with_the_known_ones():
    for level in ("sequence", "geometric", "", None):
        with pytest.raises(ValueError, match=r"level: .* is unknown; one of token, sequence_product"):
            log_weight(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), level=level)


def test_a_wrong_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^old_log_prob has shape \(1, 3\), but response_mask has \(1, 2\)"):
        log_ratio(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
    with pytest.raises(ValueError, match="^new_log_prob has shape"):
        log_ratio(torch.zeros(2), torch.zeros(1, 2), torch.ones(1, 2))
