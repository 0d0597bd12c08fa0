"""SAPO: by hand with unequal steepness, its slope at 1, how far it fades, gradients, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near, from_ratios
from trimtab.policy_loss import sapo

TAUS = {"tau_positive": 0.5, "tau_negative": 2.0}
# sigmoid(0.5) = 0.62245933, sigmoid(1) = 0.73105858, sigmoid(2) = 0.88079708, sigmoid(-1/4) = 0.43782350
S_HALF, S_1, S_2, S_QUARTER = (1 / (1 + math.exp(-x)) for x in (0.5, 1.0, 2.0, -0.25))
# Columns: ratio, advantage, loss -4/tau sigmoid(tau (r - 1)) A, gradient -4 r s (1 - s) A. Where A > 0 tau is 0.5 and
# 4 / tau 8, else 2 and 2.
GOLDEN = [
    (1.0, 3.0, -8 * 0.5 * 3, -3.0),
    (1.0, -1.0, 2 * 0.5, 1.0),
    (2.0, 3.0, -8 * S_HALF * 3, -4 * 2 * S_HALF * (1 - S_HALF) * 3),
    (2.0, -1.0, 2 * S_2, 4 * 2 * S_2 * (1 - S_2)),
    (0.5, 3.0, -8 * S_QUARTER * 3, -4 * 0.5 * S_QUARTER * (1 - S_QUARTER) * 3),
    (0.5, -1.0, 2 * (1 - S_1), 4 * 0.5 * S_1 * (1 - S_1)),
    (2.0, 0.0, 0.0, 0.0),
]


def row():
    ratio, advantage, loss, gradient = zip(*GOLDEN, strict=True)
    new, old = from_ratios([ratio])
    return new, old, torch.tensor([advantage], dtype=torch.float64), torch.ones(1, len(ratio)), [loss], [gradient]


def test_golden_loss_and_gradient():
    new, old, advantages, mask, expected, gradient = row()
    assert_near(torch.tensor([S_HALF, S_1, S_2, S_QUARTER]), [0.62245933, 0.73105858, 0.88079708, 0.43782350])
    loss, _ = sapo(new, old, advantages, mask, **TAUS)
    assert_near(loss.detach(), expected, rtol=1e-12)
    loss.sum().backward()
    assert_near(new.grad, gradient, rtol=1e-12)


def test_golden_metrics():
    new, old, advantages, mask, _, _ = row()
    mask[0, 5], old[0, 4] = 0, math.nan
    loss, metrics = sapo(new, old, advantages, mask, **TAUS)
    assert (loss[0, 4:6] == 0).all()
    # The gate's slope of the tokens 0 to 3 and 6, which has the steepness of A < 0.
    slopes = [1, 1, 8 * S_HALF * (1 - S_HALF), 8 * S_2 * (1 - S_2), 8 * S_2 * (1 - S_2)]
    expected = {
        "gate/mean": sum(slopes) / 5,
        "gate/count": 5,
        "ratio/mean": 8 / 5,
        "ratio/min": 1.0,
        "ratio/max": 2.0,
        "tokens/count": 6,
        "nonfinite/count": 1,
    }
    for key, value in expected.items():
        assert_near(metrics[key], value, rtol=1e-6)


def test_the_defaults_are_those_of_the_paper():
    new, old, advantages, mask, _, _ = row()
    implied = sapo(new, old, advantages, mask)
    torch.testing.assert_close(
        implied, sapo(new, old, advantages, mask, tau_positive=1.0, tau_negative=1.05), rtol=0, atol=0
    )
    # In float64 1.05 is 1.05, and not the nearest float32, which is off by 5e-8.
    expected = 4 / 1.05 / (1 + math.exp(-1.05))
    assert_near(implied[0][0, 3].detach(), expected, rtol=1e-14, atol=0)
    assert_near(implied[0][0, 2].detach(), -4 * 3 * S_1, rtol=1e-14, atol=0)


def test_each_token_has_the_steepness_of_its_own_advantage():
    new, old = from_ratios([[2.0, 2.0]])
    loss, _ = sapo(new, old, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2), **TAUS)
    assert_near(loss.detach(), [[-8 * S_HALF, 2 * S_2]], rtol=1e-12)


@settings(deadline=None, derandomize=True)
@given(st.floats(-3, 3), st.floats(0.05, 20), st.floats(0.05, 20))
def test_the_slope_at_1_is_1_for_every_steepness(advantage, positive, negative):
    new = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([advantage], dtype=torch.float64)
    loss, metrics = sapo(new, new.detach(), a, torch.ones(1, 1), tau_positive=positive, tau_negative=negative)
    loss.sum().backward()
    assert_near(new.grad, [[-advantage]], rtol=1e-12, atol=1e-15)
    assert_near(metrics["gate/mean"], 1.0, rtol=1e-12)


@settings(deadline=None, derandomize=True)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(0.1, 5), st.floats(0.1, 5))
def test_equals_the_scalar_formula(log_r, advantage, positive, negative):
    ratio, tau = math.exp(log_r), positive if advantage > 0 else negative
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    new = torch.tensor([[log_r]], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([advantage], dtype=torch.float64)
    loss, metrics = sapo(new, torch.zeros(1, 1), a, torch.ones(1, 1), tau_positive=positive, tau_negative=negative)
    assert_near(loss.detach(), [[-4 / tau * gate * advantage]], rtol=1e-9, atol=1e-12)
    loss.sum().backward()
    slope = ratio * 4 * gate * (1 - gate)
    assert_near(new.grad, [[-advantage * slope]], rtol=1e-6, atol=1e-9)
    assert_near(metrics["gate/mean"], slope, rtol=1e-6, atol=1e-9)
    assert new.grad.item() * advantage <= 0 and abs(loss.item()) <= 4 / tau * abs(advantage) + 1e-12


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_far_above_1_the_gate_is_open_and_far_below_almost_closed(advantage):
    tau = 1.0 if advantage > 0 else 1.05
    for drift, gate in ((100.0, 1.0), (-100.0, 1 / (1 + math.exp(tau)))):
        new = torch.tensor([[drift]], dtype=torch.float64, requires_grad=True)
        loss, metrics = sapo(new, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1))
        loss.sum().backward()
        assert_near(loss.detach(), [[-4 / tau * gate * advantage]], rtol=1e-9)
        expected = -advantage * 4 * math.exp(drift) * gate * (1 - gate) if drift < 0 else 0.0
        assert_near(new.grad, [[expected]], rtol=1e-9, atol=0)
        assert metrics["gate/mean"].isfinite()


def test_gradcheck():
    new, old, advantages, mask, _, _ = row()
    assert torch.autograd.gradcheck(lambda x: sapo(x, old, advantages, mask, **TAUS)[0], (new,))


@pytest.mark.parametrize("key", ["tau_positive", "tau_negative"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_steepness_that_is_not_above_0_is_refused(key, value):
    with pytest.raises(ValueError, match=f"^{key}: "):
        sapo(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), **{key: value})
