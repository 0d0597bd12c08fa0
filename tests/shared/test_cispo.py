"""CISPO: by hand with unequal bounds, the gradient of a bounded token, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.policy_loss import cispo

# Bounds of the ratio itself: cap 1.5, floor 0.6. Columns: ratio, advantage, log-prob, loss -w A log p, gradient -w A.
GOLDEN = [
    (1.20, 2.0, -0.50, 1.2000, -2.40),
    (3.00, 2.0, -1.00, 3.0000, -3.00),  # w is 1.5; PPO would leave no gradient
    (0.20, -1.0, -2.00, -1.2000, 0.60),  # w is 0.6; the same
    (1.25, -3.0, -0.25, -0.9375, 3.75),
    (0.70, 1.0, -4.00, 2.8000, -0.70),
    (1.20, 0.0, -1.00, 0.0000, 0.00),
    (4.00, 1.0, -0.20, 0.3000, -1.50),
]


def row():
    ratio, advantage, log_prob, loss, gradient = (
        torch.tensor([column], dtype=torch.float64) for column in zip(*GOLDEN, strict=True)
    )
    old = log_prob - ratio.log()
    return log_prob.requires_grad_(), old, advantage, torch.ones(ratio.shape), loss, gradient


def one(log_ratio, advantage=1.0, log_prob=-1.0, **keys):
    """Loss, gradient and metrics of one token."""
    new = torch.tensor([[log_prob]], dtype=torch.float64, requires_grad=True)
    loss, metrics = cispo(new, new.detach() - log_ratio, torch.tensor([advantage]), torch.ones(1, 1), **keys)
    loss.sum().backward()
    return loss.item(), new.grad.item(), metrics


def test_golden_loss_and_gradient():
    new, old, advantages, mask, expected, gradient = row()
    loss, _ = cispo(new, old, advantages, mask, cap=1.5, floor=0.6)
    assert_near(loss.detach(), expected, rtol=1e-12)
    loss.sum().backward()
    assert_near(new.grad, gradient, rtol=1e-12)


def test_golden_metrics():
    new, old, advantages, mask, _, _ = row()
    _, metrics = cispo(new, old, advantages, mask, cap=1.5, floor=0.6)
    expected = {
        "clip/mean": 3 / 7,
        "clip_high/mean": 2 / 7,
        "clip_low/mean": 1 / 7,
        "ratio/mean": 11.55 / 7,  # 1.2 + 3 + 0.2 + 1.25 + 0.7 + 1.2 + 4
        "ratio/max": 4.0,
        "ratio/min": 0.2,
        "weight/mean": 7.95 / 7,  # 1.2 + 1.5 + 0.6 + 1.25 + 0.7 + 1.2 + 1.5
        "weight/max": 1.5,
        "weight/min": 0.6,
        "clip/count": 7,
        "tokens/count": 7,
        "nonfinite/count": 0,
    }
    for key, value in expected.items():
        assert_near(metrics[key], value, rtol=1e-6)


def test_golden_over_the_live_tokens_only():
    new, old, advantages, mask, expected, _ = row()
    mask[0, [1, 6]], old[0, 2] = 0, math.nan
    loss, metrics = cispo(new, old, advantages, mask, cap=1.5, floor=0.6)
    expected[0, [1, 2, 6]] = 0
    assert_near(loss.detach(), expected, rtol=1e-12)
    assert_near(metrics["weight/mean"], 4.35 / 4)
    assert (metrics["clip/mean"], metrics["clip/count"], metrics["nonfinite/count"]) == (0, 4, 1)


def test_a_cap_of_5_is_5_and_not_6():
    # TRL and ScaleRL mean the ratio's bound, veRL and others the distance from 1.
    assert one(math.log(5.5), cap=5.0)[1] == pytest.approx(-5.0)
    assert one(math.log(4.9), cap=5.0)[1] == pytest.approx(-4.9)


def test_there_is_no_floor_unless_it_is_set():
    assert one(math.log(1e-6), cap=5.0)[1] == pytest.approx(-1e-6)
    assert one(math.log(1e-6), cap=5.0)[2]["clip_low/mean"] == 0


def test_a_token_on_a_bound_is_not_counted_as_clipped():
    for bounds in ({"cap": 1.0}, {"cap": 2.0, "floor": 1.0}):
        assert one(0.0, **bounds)[2]["clip/mean"] == 0


@pytest.mark.parametrize("log_ratio", [-2.0, 0.0, 0.1, 2.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_gradient_of_a_bounded_token_has_the_right_sign(log_ratio, advantage):
    # https://github.com/KMnO4-zx/agentic-rl-lab/pull/22: without the minus the policy unlearns what was good.
    loss, gradient, _ = one(log_ratio, advantage, cap=1.2, floor=0.9)
    assert gradient * advantage < 0
    assert loss * advantage > 0  # a log-prob is negative
    assert 0.9 * 2 <= abs(gradient) <= 1.2 * 2


@pytest.mark.parametrize(
    ("drift", "floor", "weight"), [(100.0, 0.0, 3.0), (-100.0, 0.0, math.exp(-20)), (-100.0, 0.5, 0.5)]
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_hundred_nats_away_the_weight_is_its_bound(drift, floor, weight, advantage):
    loss, gradient, metrics = one(drift, advantage, cap=3.0, floor=floor)
    assert gradient == pytest.approx(-weight * advantage, rel=1e-9, abs=0)
    assert loss == pytest.approx(weight * advantage, rel=1e-9, abs=0)
    assert metrics["weight/max"] == pytest.approx(weight, rel=1e-6, abs=0)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-5, -0.01)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(1, 6),
)
def test_equals_the_scalar_formula(tokens, floor, cap):
    log_r, advantage, log_prob = (torch.tensor([column], dtype=torch.float64) for column in zip(*tokens, strict=True))
    new = log_prob.clone().requires_grad_()
    loss, _ = cispo(new, log_prob - log_r, advantage, torch.ones(log_r.shape), cap=cap, floor=floor)
    loss.sum().backward()
    weights = torch.tensor([[min(max(math.exp(r), floor), cap) for r, _, _ in tokens]], dtype=torch.float64)
    assert_near(loss.detach(), -weights * advantage * log_prob, rtol=1e-9, atol=1e-12)
    assert_near(new.grad, -weights * advantage, rtol=1e-9, atol=1e-12)


def test_gradcheck_with_the_weight_held():
    new, old, advantages, mask, _, _ = row()
    log_r = (new - old).detach()
    assert torch.autograd.gradcheck(
        lambda x: cispo(x, x.detach() - log_r, advantages, mask, cap=1.5, floor=0.6)[0], (new,)
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cap": 0.0}, "^cap: 0.0"),
        ({"cap": -1.0}, "^cap: -1.0"),
        ({"cap": math.nan}, "^cap: nan"),
        ({"cap": 2.0, "floor": -0.1}, "^floor: -0.1"),
        ({"cap": 2.0, "floor": 2.5}, "^floor: 2.5 must lie between 0 and cap"),
        ({"cap": 2.0, "floor": math.nan}, "^floor: nan"),
    ],
)
def test_bounds_that_exclude_each_other_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        one(0.0, **keys)


def test_the_cap_has_no_default():
    with pytest.raises(TypeError, match="cap"):
        one(0.0)
