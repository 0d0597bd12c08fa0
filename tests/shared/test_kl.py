"""Estimators of the divergence from the reference: by hand, what they estimate, far policies, gradients, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near
from trimtab.kl import ESTIMATORS, k3_estimate, kl_penalty

E20 = math.exp(20)


def penalty(log_prob, ref, estimator, old=None):
    """The value of one token and its gradient, in float64."""
    log_prob = torch.tensor([[log_prob]], dtype=torch.float64, requires_grad=True)
    old = None if old is None else torch.tensor([[old]], dtype=torch.float64)
    value = kl_penalty(
        log_prob,
        torch.tensor([[ref]], dtype=torch.float64),
        torch.ones(1, 1),
        estimator=estimator,
        old_log_prob=old,
    )
    value.backward()
    return value.detach().squeeze(), log_prob.grad.squeeze()


def test_golden():
    # d = ref - current = log 2: k1 = -d; k2 = d^2/2; k3 = 2 - 1 - d, its gradient 1 - 2.
    d = math.log(2)
    for estimator, value, gradient in (("k1", -d, 1.0), ("k2", d * d / 2, -d), ("k3", 1 - d, -1.0)):
        result = penalty(-1.0 - d, -1.0, estimator)
        assert_near(result[0], value, rtol=1e-12)
        assert_near(result[1], gradient, rtol=1e-12)
    # The other way round, d = -log 2: 1/2 - 1 + log 2, gradient 1 - 1/2.
    value, gradient = penalty(-1.0, -1.0 - d, "k3")
    assert_near(value, d - 0.5, rtol=1e-12)
    assert_near(gradient, 0.5, rtol=1e-12)


def test_golden_unbiased():
    # Ratio current/old = 3, d = log 2: 3 (1 - log 2), and the gradient of ratio * k3 is 3 (k3 - 1) = -3 log 2.
    d = math.log(2)
    value, gradient = penalty(-1.0 - d, -1.0, "unbiased", old=-1.0 - d - math.log(3))
    assert_near(value, 3 * (1 - d), rtol=1e-12)
    assert_near(gradient, -3 * d, rtol=1e-12)


def test_the_default_is_k3_and_masked_tokens_cost_nothing():
    log_prob, ref = torch.tensor([[0.0, torch.nan, -1.0, -2.0]]), torch.tensor([[-math.log(2), 0.0, torch.inf, -2.0]])
    result = kl_penalty(log_prob, ref, torch.tensor([[1, 0, 1, 1]]))
    assert_near(result, [[math.log(2) - 0.5, 0.0, 0.0, 0.0]])


def test_a_token_that_only_the_old_policy_cannot_rate_is_removed_from_unbiased_alone():
    log_prob, ref = torch.tensor([[-1.0, -1.0]], requires_grad=True), torch.tensor([[-2.0, -2.0]])
    old = torch.tensor([[-1.0, torch.nan]])
    result = kl_penalty(log_prob, ref, torch.ones(1, 2), estimator="unbiased", old_log_prob=old)
    result.sum().backward()
    assert_near(result.detach(), [[math.exp(-1), 0.0]])  # d = -1: exp(-1) - 1 + 1
    assert_near(log_prob.grad, [[1.0, 0.0]])
    assert_near(kl_penalty(log_prob.detach(), ref, torch.ones(1, 2), old_log_prob=old), [[math.exp(-1)] * 2])


def test_a_reference_100_nats_above_overflows_in_no_estimator():
    # https://github.com/huggingface/trl/issues/3015: ref 0, policy -100 gave inf, with a gradient of -inf.
    # By the tangent: exp(20) (1 + 80) - 1 - 100, slope 1 - exp(20).
    value, gradient = penalty(-100.0, 0.0, "k3")
    assert_near(value, 81 * E20 - 101, rtol=1e-9)
    assert_near(gradient, 1 - E20, rtol=1e-9)
    value, gradient = penalty(0.0, -100.0, "k3")
    assert_near(value, 99.0, rtol=1e-9)
    assert_near(gradient, 1.0, rtol=1e-9)
    assert_near(torch.stack(penalty(-100.0, 0.0, "k2")), [5000.0, -100.0])
    assert_near(torch.stack(penalty(-100.0, 0.0, "k1")), [-100.0, 1.0])


@pytest.mark.parametrize("old", [-100.0, -90.0, -130.0, -60.0, 0.0])
@pytest.mark.parametrize("log_prob", [-100.0, -79.0, -40.0])
def test_unbiased_pulls_towards_the_reference_however_far_it_is(log_prob, old):
    # Its gradient is -ratio * (ref - current). The product of two tangents would turn the sign beyond 20 nats.
    for ref in (0.0, -200.0):
        value, gradient = penalty(log_prob, ref, "unbiased", old=old)
        update = log_prob - old
        ratio = math.exp(min(update, 20)) * (1 + max(update - 20, 0))
        assert_near(gradient, -ratio * (ref - log_prob), rtol=1e-9, atol=0)
        assert value.isfinite() and value > 0


@settings(deadline=None, derandomize=True)
@given(st.floats(-19, 19))
def test_k3_is_never_negative_and_equals_its_formula(d):
    value = k3_estimate(torch.tensor(d, dtype=torch.float64))
    assert value >= 0
    assert_near(value, math.expm1(d) - d, rtol=1e-9, atol=1e-15)
    assert k3_estimate(torch.tensor(d, dtype=torch.float32)) >= -1e-12


def test_k3_keeps_its_digits_where_the_policies_almost_agree():
    # exp(d) - 1 - d in float32 at d = 1e-3 has an error of 1e-7, a fifth of the value, 5e-7.
    value = k3_estimate(torch.tensor([1e-3, -1e-3]))
    assert_near(value, [5.001667e-07, 4.998334e-07], rtol=1e-3, atol=0)


def test_k3_continues_as_its_tangent():
    value = k3_estimate(torch.tensor([20.0, 21.0, 30.0], dtype=torch.float64))
    assert_near(value, [E20 - 21, 2 * E20 - 22, 11 * E20 - 31], rtol=1e-12)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.lists(st.floats(-2, 2), min_size=3, max_size=3))
def test_what_the_estimators_estimate(logits, ref_logits):
    """Expectations over a vocabulary of three, sampled from the current policy, in value and in gradient."""
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(ref_logits, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.detach().exp()
    towards_ref = (log_p.exp() * (log_p - ref)).sum()  # KL(current || reference)
    from_ref = (ref.exp() * (ref - log_p)).sum()  # KL(reference || current)
    (towards_gradient,) = torch.autograd.grad(towards_ref, logits, retain_graph=True)
    (from_gradient,) = torch.autograd.grad(from_ref, logits, retain_graph=True)
    gradients = {"k1": torch.zeros(3), "k2": towards_gradient, "k3": from_gradient, "unbiased": towards_gradient}
    for estimator in ESTIMATORS:
        tokens = kl_penalty(
            log_p[None], ref[None], torch.ones(1, 3), estimator=estimator, old_log_prob=log_p.detach()[None]
        )
        expectation = (p * tokens[0]).sum()
        if estimator != "k2":
            assert_near(expectation.detach(), towards_ref.detach(), rtol=1e-9, atol=1e-12)
        (gradient,) = torch.autograd.grad(expectation, logits, retain_graph=True)
        assert_near(gradient, gradients[estimator].double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradcheck(estimator):
    generator = torch.Generator().manual_seed(3)
    log_prob, ref, old = (torch.randn(2, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]])
    if estimator != "unbiased":  # whose gradient is no derivative of its value beyond 20 nats
        log_prob[0, 0], log_prob[0, 1] = ref[0, 0] - 25, ref[0, 1] + 25
    assert torch.autograd.gradcheck(
        lambda x: kl_penalty(x, ref, mask, estimator=estimator, old_log_prob=old), (log_prob.requires_grad_(),)
    )


def test_errors_name_what_is_wrong():
    one = torch.ones(1, 1)
    for estimator in ("k4", "low_var_kl", None):
        with pytest.raises(ValueError, match="^estimator: .* is unknown; one of k1, k2, k3, unbiased"):
            kl_penalty(one, one, one, estimator=estimator)
    with pytest.raises(ValueError, match="unbiased needs old_log_prob"):
        kl_penalty(one, one, one, estimator="unbiased")
    with pytest.raises(ValueError, match="^old_log_prob has shape"):
        kl_penalty(one, one, one, estimator="unbiased", old_log_prob=torch.ones(1, 2))
    with pytest.raises(ValueError, match="^log_prob has shape"):
        kl_penalty(torch.ones(1, 2), one, one)
