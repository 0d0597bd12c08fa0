"""The clipped surrogate: by hand with unequal bounds, against a scalar formula, gradients, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.policy_loss import ppo_clip

# Bounds 0.2 and 0.28, so [0.8, 1.28]. Columns: ratio, advantage, loss, gradient of log_prob, and which clip acts.
# loss = -min(r A, clip(r) A); gradient = -r A, or 0 where the clipped term is the smaller one.
GOLDEN = [
    (0.50, 2.0, -1.00, -1.00, None),  # below, but A > 0: pushed up
    (0.75, 2.0, -1.50, -1.50, None),
    (1.25, 2.0, -2.50, -2.50, None),  # a high bound of 0.2 would stop it
    (1.50, 2.0, -2.56, 0.00, "clip_high"),  # 1.28 * 2
    (0.50, -1.0, 0.80, 0.00, "clip_low"),
    (0.75, -1.0, 0.80, 0.00, "clip_low"),  # a low bound of 0.28 would let it through
    (0.85, -1.0, 0.85, 0.85, None),
    (1.50, -1.0, 1.50, 1.50, None),  # above, but A < 0: pulled back
    (4.00, -1.0, 4.00, 4.00, None),
    (1.50, 0.0, 0.00, 0.00, None),
]


def row(golden=GOLDEN, dtype=torch.float64):
    ratio, advantage, loss, gradient, _ = zip(*golden, strict=True)
    old = torch.linspace(-3, -0.5, len(ratio), dtype=dtype)[None]
    new = (old + torch.tensor([ratio], dtype=dtype).log()).requires_grad_()
    return new, old, torch.tensor([advantage], dtype=dtype), torch.ones(1, len(ratio)), loss, gradient


def test_golden_loss_and_gradient():
    new, old, advantages, mask, expected, gradient = row()
    loss, _ = ppo_clip(new, old, advantages, mask, clip_low=0.2, clip_high=0.28)
    assert_near(loss.detach(), [expected], rtol=1e-12)
    loss.sum().backward()
    assert_near(new.grad, [gradient], rtol=1e-12, atol=1e-12)


def test_golden_metrics():
    new, old, advantages, mask, _, _ = row()
    _, metrics = ppo_clip(new, old, advantages, mask, clip_low=0.2, clip_high=0.28)
    expected = {
        "clip_low/mean": 2 / 10,
        "clip_high/mean": 1 / 10,
        "clip/mean": 3 / 10,
        "ratio/mean": 13.1 / 10,  # 0.5 + 0.75 + 1.25 + 1.5 + 0.5 + 0.75 + 0.85 + 1.5 + 4 + 1.5
        "ratio/min": 0.5,
        "ratio/max": 4.0,
        "tokens/count": 10.0,
        "nonfinite/count": 0.0,
        "clip/count": 10.0,
        "ratio/count": 10.0,
    }
    for key, value in expected.items():
        assert_near(metrics[key], value, rtol=1e-6)
    assert "dual_clip/mean" not in metrics


def test_golden_dual_clip():
    # At most 3 * |A| where A < 0: of the tokens above only the one at 4 is beyond. A > 0 knows no dual clip.
    golden = [*GOLDEN, (5.0, 2.0, -2.56, 0.0, "clip_high"), (2.9, -2.0, 5.8, 5.8, None), (3.1, -2.0, 6.0, 0.0, None)]
    new, old, advantages, mask, expected, gradient = row(golden)
    expected, gradient = list(expected), list(gradient)
    expected[8], gradient[8] = 3.0, 0.0
    loss, metrics = ppo_clip(new, old, advantages, mask, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert_near(loss.detach(), [expected], rtol=1e-12)
    loss.sum().backward()
    assert_near(new.grad, [gradient], rtol=1e-12, atol=1e-12)
    assert_near(metrics["dual_clip/mean"], 2 / 13)
    assert_near(metrics["dual_clip/count"], 13.0)


def test_golden_over_the_live_tokens_only():
    new, old, advantages, mask, expected, _ = row(dtype=torch.float32)
    mask[0, [3, 5]] = 0  # one token clipped high, one clipped low
    with torch.no_grad():
        new[0, 8] = torch.nan
    loss, metrics = ppo_clip(new, old, advantages, mask, clip_low=0.2, clip_high=0.28)
    expected = torch.tensor([expected])
    expected[0, [3, 5, 8]] = 0
    assert_near(loss.detach(), expected)
    for key, value in {"clip_low/mean": 1 / 7, "clip_high/mean": 0, "clip/mean": 1 / 7, "ratio/max": 1.5}.items():
        assert_near(metrics[key], value)
    assert (metrics["tokens/count"], metrics["nonfinite/count"], metrics["clip/count"]) == (8, 1, 7)


def test_the_defaults_are_0_2_both_ways_and_no_dual_clip():
    new, old, advantages, mask, _, _ = row()
    implied, _ = ppo_clip(new, old, advantages, mask)
    stated, _ = ppo_clip(new, old, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=None)
    torch.testing.assert_close(implied, stated, rtol=0, atol=0)
    assert_near(implied[0, [2, 3, 8]].detach(), [-2.4, -2.4, 4.0])


def test_a_token_on_a_bound_is_not_counted_as_clipped():
    new = torch.tensor([[1.5, 0.5]]).log()
    _, metrics = ppo_clip(
        new, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2), clip_low=0.5, clip_high=0.5
    )
    assert metrics["clip/mean"] == 0


def test_a_far_token_with_a_negative_advantage_is_pulled_back_hard():
    # r A at +100 nats: exp(20) (1 + 80) by the tangent; its slope is exp(20). A clamp would leave no gradient.
    new = torch.tensor([[100.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = ppo_clip(new, torch.zeros(1, 1), torch.tensor([-2.0]), torch.ones(1, 1))
    loss.backward()
    assert_near(loss.detach(), [[2 * 81 * math.exp(20)]], rtol=1e-9)
    assert_near(new.grad, [[2 * math.exp(20)]], rtol=1e-9)


@settings(deadline=None, derandomize=True)
@given(
    st.floats(-2, 2),
    st.floats(-3, 3),
    st.floats(0, 1),
    st.floats(0, 2),
    st.one_of(st.none(), st.floats(1.01, 10)),
)
def test_equals_the_scalar_formula(log_r, advantage, low, high, dual):
    ratio = math.exp(log_r)
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage) if ratio > dual else objective
    new, zero = torch.tensor([[log_r]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    a = torch.tensor([advantage], dtype=torch.float64)
    loss, _ = ppo_clip(new, zero, a, torch.ones(1, 1), clip_low=low, clip_high=high, dual_clip=dual)
    assert_near(loss, [[-objective]], rtol=1e-9, atol=1e-12)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=6), st.floats(0.1, 3), st.floats(0.05, 0.9))
def test_the_loss_is_an_upper_bound_and_scales_with_the_advantage(log_ratios, advantage, bound):
    new = torch.tensor([log_ratios], dtype=torch.float64)
    mask, zero = torch.ones(new.shape), torch.zeros_like(new)
    for sign in (1, -1):
        a = torch.tensor([sign * advantage], dtype=torch.float64)
        loss, _ = ppo_clip(new, zero, a, mask, clip_low=bound, clip_high=2 * bound)
        assert (loss >= -new.exp() * a - 1e-12).all()
        twice, _ = ppo_clip(new, zero, 2 * a, mask, clip_low=bound, clip_high=2 * bound)
        assert_near(twice, 2 * loss, rtol=1e-12)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_gradcheck(dual_clip):
    new, old, advantages, mask, _, _ = row()  # no ratio lies on a kink
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip(x, old, advantages, mask, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)[0], (new,)
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("clip_low", value) for value in (-0.1, 1.1, math.nan)),
        *(("clip_high", value) for value in (-0.1, math.nan)),
        *(("dual_clip", value) for value in (1.0, 0.2, -3.0, math.nan)),
    ],
)
def test_a_bound_out_of_range_is_refused(key, value):
    with pytest.raises(ValueError, match=f"^{key}: "):
        ppo_clip(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), **{key: value})
