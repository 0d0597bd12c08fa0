"""MinPRO: the minimum prefix ratio by hand, against a loop, its bounds and gradient, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near, from_ratios
from trimtab.policy_loss import minpro


def weights(ratios, mask=None, advantages=None, **keys):
    """The weights that act, read from the gradient -w A with A = 1, and the metrics."""
    new, old = from_ratios(ratios)
    mask = torch.ones(new.shape) if mask is None else torch.tensor(mask)
    advantages = torch.ones(new.shape) if advantages is None else torch.tensor(advantages)
    loss, metrics = minpro(new, old, advantages, mask, **({"cap": 5.0} | keys))
    loss.sum().backward()
    assert_near(loss.detach(), torch.where(new.grad != 0, new.detach() * new.grad, 0.0), rtol=1e-12)  # -w A log p
    return -new.grad, metrics


def test_golden_weights():
    # Prefix minima 1, 0.9, 0.9, 0.5. With t in the prefix it would be 0.81, 1.08, 0.25, 0.55.
    assert_near(weights([[0.9, 1.2, 0.5, 1.1]])[0], [[0.9, 1.08, 0.45, 0.55]], rtol=1e-12)
    # No ratio before t is under 1, and the empty prefix is 1: the token's own ratio.
    assert_near(weights([[1.2, 1.5, 1.2]])[0], [[1.2, 1.5, 1.2]], rtol=1e-12)
    # The smallest, and neither the last nor the product: 1, 0.5, 0.5, 0.5.
    assert_near(weights([[0.5, 0.8, 0.9, 2.0]])[0], [[0.5, 0.4, 0.45, 1.0]], rtol=1e-12)
    assert_near(weights([[0.9, 1.2], [0.5, 1.1]])[0], [[0.9, 1.08], [0.5, 0.55]], rtol=1e-12)  # rows are alone


def test_golden_bounds():
    # Cap 1 and floor 0.6 on the weight, after the prefix: 1.08, 0.45 and 0.55 are bounded; 0.5 in the prefix is not.
    result, metrics = weights([[0.9, 1.2, 0.5, 1.1]], cap=1.0, floor=0.6)
    assert_near(result, [[0.9, 1.0, 0.6, 0.6]], rtol=1e-12)
    expected = {
        "clip/mean": 3 / 4,
        "clip_high/mean": 1 / 4,
        "clip_low/mean": 2 / 4,
        "ratio/mean": 2.98 / 4,
        "ratio/min": 0.45,
        "ratio/max": 1.08,
        "weight/mean": 3.1 / 4,
        "weight/min": 0.6,
        "weight/max": 1.0,
        "tokens/count": 4,
    }
    for key, value in expected.items():
        assert_near(metrics[key], value, rtol=1e-6)
    # A ratio under the floor enters the prefix as it is: 0.1 * 4 is 0.4, not 0.5 * 4.
    assert_near(weights([[0.1, 4.0]], cap=3.0, floor=0.3)[0], [[0.3, 0.4]], rtol=1e-12)
    assert_near(weights([[1e-4, 2.0]])[0], [[1e-4, 2e-4]], rtol=1e-12)  # no floor unless it is set


def test_golden_loss_and_gradient_by_sign():
    new = torch.tensor([[-0.5, -2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = new.detach() - torch.tensor([[0.8, 1.5, 4.0]], dtype=torch.float64).log()
    loss, _ = minpro(new, old, torch.tensor([[2.0, -1.0, 3.0]]), torch.ones(1, 3), cap=2.5)
    # Weights 0.8, 1.2 and 3.2, capped at 2.5.
    assert_near(loss.detach(), [[0.8, -2.4, 7.5]], rtol=1e-12)
    loss.sum().backward()
    assert_near(new.grad, [[-1.6, 1.2, -7.5]], rtol=1e-12)


def test_the_prefix_runs_over_live_tokens_only():
    # A masked 0.1, a token that is not finite and one without an advantage stay out of every prefix.
    nan = math.nan
    mask = [[0, 1, 0, 1, 1]]
    assert_near(weights([[0.1, 0.9, 0.1, 1.2, 1.1]], mask)[0], [[0.0, 0.9, 0.0, 1.08, 0.99]], rtol=1e-12)
    assert_near(weights([[nan, 0.9, nan, 1.2, 1.1]], mask)[0], [[0.0, 0.9, 0.0, 1.08, 0.99]], rtol=1e-12)
    assert_near(weights([[0.9, nan, 1.2]])[0], [[0.9, 0.0, 1.08]], rtol=1e-12)
    result, metrics = weights([[0.9, 0.1, 1.2]], advantages=[[1.0, nan, 1.0]])
    assert_near(result, [[0.9, 0.0, 1.08]], rtol=1e-12)
    assert metrics["nonfinite/count"] == 1


def test_a_later_token_changes_no_earlier_weight():
    first, second = (weights([[0.9, 1.2, last, 1.1]])[0] for last in (0.01, 3.0))
    assert_near(first[:, :2], second[:, :2], rtol=1e-12)
    assert first[0, 3] != second[0, 3]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_hundred_nats_away_the_weight_is_bounded(advantage):
    # Log weights 100, -30 and 30: exponents are clamped once, after prefix and token are added, or the last would be 0.
    new = torch.tensor([[100.0, -30.0, 60.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = minpro(new, torch.zeros(1, 3), torch.tensor([advantage]), torch.ones(1, 3), cap=3.0)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert_near(-new.grad / advantage, [[3.0, math.exp(-20), 3.0]], rtol=1e-9, atol=0)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.booleans()), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(1, 6),
)
def test_equals_a_loop_over_the_tokens(tokens, floor, cap):
    expected, smallest = [], 1.0
    for log_r, live in tokens:
        expected.append(min(max(smallest * math.exp(log_r), floor), cap) if live else 0.0)
        smallest = min(smallest, math.exp(log_r)) if live else smallest
    log_r, mask = torch.tensor([[log_r for log_r, _ in tokens]], dtype=torch.float64), [[live for _, live in tokens]]
    new = torch.full(log_r.shape, -1.0, dtype=torch.float64, requires_grad=True)
    loss, _ = minpro(new, new.detach() - log_r, torch.tensor([2.0]), torch.tensor(mask), cap=cap, floor=floor)
    loss.sum().backward()
    assert_near(loss.detach(), [[2 * weight for weight in expected]], rtol=1e-9)
    assert_near(new.grad, [[-2 * weight for weight in expected]], rtol=1e-9)


def test_gradcheck_with_the_weight_held():
    new, old = from_ratios([[0.9, 1.2, 0.5, 1.1], [3.0, 0.2, 1.4, 0.7]])
    log_r, mask = (new - old).detach(), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]])
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: minpro(x, x.detach() - log_r, advantages, mask, cap=1.0, floor=0.5)[0], (new,)
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cap": 0.0}, "^cap: 0.0"),
        ({"cap": math.nan}, "^cap: nan"),
        ({"floor": -0.1}, "^floor: -0.1"),
        ({"floor": 5.5}, "^floor: 5.5 must lie between 0 and cap"),
    ],
)
def test_bounds_that_exclude_each_other_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        weights([[1.0]], **keys)


def test_the_cap_has_no_default():
    with pytest.raises(TypeError, match="cap"):
        minpro(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1))
