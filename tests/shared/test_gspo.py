"""GSPO: by hand with unequal bounds, its token form, what the mask keeps out of a row's ratio, gradients, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near, from_ratios, ragged_batch
from trimtab.aggregation import aggregate
from trimtab.policy_loss import gspo, gspo_token

# Bounds 0.1 and 0.25, so [0.9, 1.25]. Each row: token ratios of two tokens, their geometric mean s, the advantage, the
# loss -min(s A, clip(s) A), and -s A where it is not clipped: the gradient of the row's loss with respect to the sum of
# its log-probs, times the number of its tokens.
GOLDEN = [
    ([2.42, 0.5], 1.1, 2.0, -2.2, -2.2),  # sqrt(1.21); no token alone is within the bounds
    ([2.88, 0.5], 1.2, 2.0, -2.4, -2.4),  # a high bound of 0.1 would stop it
    ([3.2, 0.8], 1.6, 2.0, -2.5, 0.0),  # clipped at 1.25
    ([0.4, 1.6], 0.8, 3.0, -2.4, -2.4),  # below, but A > 0: pushed up
    ([0.4, 1.6], 0.8, -1.0, 0.9, 0.0),  # clipped at 0.9; a low bound of 0.25 would let it through
    ([0.5, 0.72], 0.6, -2.0, 1.8, 0.0),
    ([3.2, 0.8], 1.6, -1.0, 1.6, 1.6),  # above, but A < 0: pulled back
]
BOUNDS = {"clip_low": 0.1, "clip_high": 0.25}


def golden():
    ratios, s, advantages, loss, gradient = zip(*GOLDEN, strict=True)
    new, old = from_ratios(ratios)
    columns = (torch.tensor(column, dtype=torch.float64) for column in (s, advantages, loss, gradient))
    return new, old, torch.ones(len(ratios), 2), *columns


def test_golden_loss_and_gradient():
    new, old, mask, _, advantages, expected, gradient = golden()
    loss, _ = gspo(new, old, advantages, mask, **BOUNDS)
    assert_near(loss.detach(), expected[:, None].expand(-1, 2), rtol=1e-12)
    total = aggregate(loss, mask, mode="seq-mean-token-mean")
    assert_near(total.detach(), expected.mean(), rtol=1e-12)
    total.backward()
    assert_near(new.grad, (gradient / 2 / len(GOLDEN))[:, None].expand(-1, 2), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("core", [gspo, gspo_token])
def test_golden_metrics(core):
    new, old, mask, s, advantages, _, _ = golden()
    _, metrics = core(new, old, advantages, mask, **BOUNDS)
    expected = {
        "clip_low/mean": 2 / 7,
        "clip_high/mean": 1 / 7,
        "clip/mean": 3 / 7,
        "ratio/mean": s.mean(),
        "ratio/min": 0.6,
        "ratio/max": 1.6,
        "clip/count": 14,
        "tokens/count": 14,
        "nonfinite/count": 0,
    }
    for key, value in expected.items():
        assert_near(metrics[key], value, rtol=1e-6)


def test_golden_token_form():
    # The rows' s as above; each token has an advantage and, through its own log-prob alone, the gradient -s A.
    new, old = from_ratios([[2.42, 0.5], [3.2, 0.8], [0.4, 1.6]])
    advantages = torch.tensor([[2.0, -1.0], [2.0, -1.0], [3.0, -1.0]], dtype=torch.float64)
    loss, metrics = gspo_token(new, old, advantages, torch.ones(3, 2), **BOUNDS)
    assert_near(loss.detach(), [[-2.2, 1.1], [-2.5, 1.6], [-2.4, 0.9]], rtol=1e-12)
    loss.sum().backward()
    assert_near(new.grad, [[-2.2, 1.1], [0.0, 1.6], [-2.4, 0.0]], rtol=1e-12, atol=1e-12)
    assert_near(metrics["clip_high/mean"], 1 / 6)
    assert_near(metrics["clip_low/mean"], 1 / 6)


def test_the_ratio_is_over_the_live_tokens_only():
    # Live 2.42 and 0.5 make 1.1, wherever they stand, and whatever stands between and after them.
    nan = math.nan
    new, old = from_ratios([[2.42, nan, 0.5, nan], [2.42, 0.5, 9.0, 0.01]])
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]])
    loss, _ = gspo(new, old, torch.tensor([2.0, 2.0]), mask, **BOUNDS)
    assert_near(loss.detach(), [[-2.2, 0.0, -2.2, 0.0], [-2.2, -2.2, 0.0, 0.0]], rtol=1e-12)
    # A token that is removed leaves the mean too: 2.42 alone is clipped.
    new, old = from_ratios([[1.21, nan]])
    assert_near(gspo(new, old, torch.tensor([2.0]), torch.ones(1, 2), **BOUNDS)[0].detach(), [[-2.42, 0.0]], rtol=1e-12)


def test_the_advantage_is_the_mean_over_live_tokens():
    # https://github.com/areal-project/AReaL/pull/1346: advantages 1, 1 and padded 10, 10 are 1, not 5.5.
    new, old = from_ratios([[1.1, 1.1, 1.1, 1.1]])
    mask = torch.tensor([[1, 1, 0, 0]])
    for garbage in (10.0, math.nan, math.inf):
        advantages = torch.tensor([[1.0, 1.0, garbage, garbage]])
        assert_near(gspo(new, old, advantages, mask, **BOUNDS)[0].detach(), [[-1.1, -1.1, 0.0, 0.0]])
    # 3 and 1 make 2; a token without an advantage is removed, with its ratio: (1.1 * 1.1) ** (1 / 2).
    assert_near(gspo(new, old, torch.tensor([[3.0, 1.0, 9.0, 9.0]]), mask, **BOUNDS)[0].detach()[0, :2], [-2.2, -2.2])
    new, old = from_ratios([[1.1, 9.0, 1.1]])
    loss, metrics = gspo(new, old, torch.tensor([[3.0, math.nan, 1.0]]), torch.ones(1, 3), **BOUNDS)
    assert_near(loss.detach(), [[-2.2, 0.0, -2.2]])
    assert metrics["nonfinite/count"] == 1


@pytest.mark.parametrize("core", [gspo, gspo_token])
def test_a_masked_token_changes_no_loss_and_has_no_gradient(core):
    # https://github.com/MakazhanAlpamys/Soup/issues/723: a masked log ratio of -2 or -6 changed the loss.
    results = []
    for masked in (-2.0, -6.0):
        new = torch.tensor([[0.1, -0.05, masked]], dtype=torch.float64, requires_grad=True)
        loss, _ = core(new, torch.zeros(1, 3), torch.tensor([1.0]), torch.tensor([[1, 1, 0]]), **BOUNDS)
        loss.sum().backward()
        assert new.grad[0, 2] == 0 and (new.grad[0, :2] != 0).all()
        results.append((loss.detach(), new.grad[:, :2]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("core", [gspo, gspo_token])
def test_the_defaults_are_those_of_the_paper(core):
    # s is 1.00035, within 4e-4 of 1, and 0.99965, beyond 3e-4.
    new, old = from_ratios([[1.00035, 1.00035], [0.99965, 0.99965]])
    loss, metrics = core(new, old, torch.tensor([1.0, -1.0]), torch.ones(2, 2))
    assert_near(loss.detach(), [[-1.00035] * 2, [0.9997] * 2], rtol=1e-9)
    assert (metrics["clip_high/mean"], metrics["clip_low/mean"]) == (0, 0.5)


def test_an_answer_of_a_hundred_tokens_weighs_as_much_as_one_of_ten():
    # https://github.com/huggingface/trl/issues/3823: summed over tokens, each answer weighs its length.
    mask = (torch.arange(100) < torch.tensor([[10], [100]])).long()
    new = torch.zeros(2, 100, dtype=torch.float64, requires_grad=True)
    loss, _ = gspo(new, torch.zeros(2, 100), torch.tensor([1.0, 1.0]), mask)
    aggregate(loss, mask, mode="seq-mean-token-mean").backward()
    assert_near(new.grad.sum(dim=1), [-0.5, -0.5], rtol=1e-12)


def test_a_far_answer_with_a_negative_advantage_is_pulled_back():
    # The mean is 100 nats, not the sum, and is continued as a tangent once: s = exp(20) (1 + 80).
    drift = torch.tensor([[150.0, 50.0]], dtype=torch.float64)
    for core, slope in ((gspo, 1.0), (gspo_token, 81.0)):  # the token form differentiates its own factor, not s
        new = drift.clone().requires_grad_()
        loss, _ = core(new, torch.zeros(1, 2), torch.tensor([-2.0]), torch.ones(1, 2))
        loss.sum().backward()
        assert_near(loss.detach(), [[2 * 81 * math.exp(20)] * 2], rtol=1e-9)
        assert_near(new.grad, [[2 * slope * math.exp(20)] * 2], rtol=1e-9)
    # +30 and -30 nats make s = 1: exponents are bounded after the mean.
    new = torch.tensor([[30.0, -30.0]], dtype=torch.float64)
    for core in (gspo, gspo_token):
        assert_near(core(new, torch.zeros(1, 2), torch.tensor([2.0]), torch.ones(1, 2))[0], [[-2.0, -2.0]], rtol=1e-12)


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 9999), st.floats(0, 0.3), st.floats(0, 0.3))
def test_with_one_advantage_an_answer_both_forms_agree(seed, low, high):
    results = []
    for core in (gspo, gspo_token):
        batch = ragged_batch(dtype=torch.float64, seed=seed)
        log_prob = batch["log_prob"].requires_grad_()
        loss, metrics = core(
            log_prob,
            batch["old_log_prob"],
            batch["advantages"],
            batch["response_mask"],
            clip_low=low,
            clip_high=high,
        )
        total = aggregate(loss, batch["response_mask"], mode="seq-mean-token-mean")
        total.backward()
        results.append((total.detach(), loss.detach(), log_prob.grad, metrics))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=5), st.floats(-3, 3), st.floats(0, 1), st.floats(0, 2))
def test_equals_the_scalar_formula(log_ratios, advantage, low, high):
    s = math.exp(sum(log_ratios) / len(log_ratios))
    objective = min(s * advantage, min(max(s, 1 - low), 1 + high) * advantage)
    new = torch.tensor([log_ratios], dtype=torch.float64)
    a = torch.tensor([advantage], dtype=torch.float64)
    for core in (gspo, gspo_token):
        loss, _ = core(new, torch.zeros_like(new), a, torch.ones(new.shape), clip_low=low, clip_high=high)
        assert_near(loss, [[-objective] * len(log_ratios)], rtol=1e-9, atol=1e-12)


def test_gradcheck():
    new, old, mask, _, advantages, _, _ = golden()  # no s lies on a kink
    advantages = torch.stack([advantages + 0.5, advantages - 0.5], dim=1)
    assert torch.autograd.gradcheck(lambda x: gspo(x, old, advantages, mask, **BOUNDS)[0], (new,))


def test_gradcheck_of_the_token_form_with_its_ratio_held():
    new, old, mask, s, advantages, _, _ = golden()
    advantages, start = torch.stack([advantages, -advantages], dim=1), new.detach().clone()

    def held(x):
        ratio = s[:, None] * torch.exp(x - start)
        return -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.25) * advantages)

    assert torch.autograd.gradcheck(held, (new,))
    loss, _ = gspo_token(new, old, advantages, mask, **BOUNDS)
    expected = torch.autograd.grad(held(new).sum(), new)[0]
    assert_near(torch.autograd.grad(loss.sum(), new)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("core", [gspo, gspo_token])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("clip_low", value) for value in (-0.1, 1.1, math.nan)),
        *(("clip_high", value) for value in (-0.1, math.nan)),
    ],
)
def test_a_bound_out_of_range_is_refused(core, key, value):
    with pytest.raises(ValueError, match=f"^{key}: "):
        core(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), **{key: value})
