"""The numbers to watch: by hand, properties, nothing to watch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near, ragged_batch
from trimtab.diagnostics import effective_sample_size, effective_share, mismatch_metrics

LOG2 = math.log(2)


def golden():
    """Ratios old/rollout of 2, 1/2, 1 in a row of three, and 4 in a row of one; rollout probabilities 1/4 and 1/8."""
    rollout = torch.tensor([[0.25, 0.25, 0.25], [0.125, 1.0, 1.0]], dtype=torch.float64).log()
    old = rollout + torch.tensor([[2.0, 0.5, 1.0], [4.0, torch.nan, 77.0]], dtype=torch.float64).log()
    return mismatch_metrics(old, rollout, torch.tensor([[1, 1, 1], [1, 0, 0]]))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("k1/mean", (-LOG2 + LOG2 + 0 - 2 * LOG2) / 4),  # -log B
        ("k3/mean", ((1 - LOG2) + (-0.5 + LOG2) + 0 + (3 - 2 * LOG2)) / 4),  # B - 1 - log B
        ("abs_diff/mean", (LOG2 + LOG2 + 0 + 2 * LOG2) / 4),
        ("abs_diff/max", 2 * LOG2),
        ("abs_diff/min", 0.0),
        ("ratio/mean", (2 + 0.5 + 1 + 4) / 4),
        ("ratio/min", 0.5),
        ("ratio/max", 4.0),
        ("chi2_token/mean", (4 + 0.25 + 1 + 16) / 4 - 1),
        ("chi2_sequence/mean", (1 + 16) / 2 - 1),  # products 1 and 4
        ("chi2_sequence/count", 2.0),
        ("prob_diff/mean", (0.25 + 0.125 + 0 + 0.375) / 4),
        ("prob_diff/max", 0.375),
        ("old_nll/mean", (LOG2 + 3 * LOG2 + 2 * LOG2 + LOG2) / 4),  # 1/2, 1/8, 1/4, 1/2
        ("rollout_nll/mean", (3 * 2 * LOG2 + 3 * LOG2) / 4),
        ("k1/count", 4.0),
        ("k3/count", 4.0),
        ("tokens/count", 4.0),
        ("nonfinite/count", 0.0),
    ],
)
def test_golden(key, expected):
    assert_near(golden()[key], expected, rtol=1e-9, atol=1e-12)


def test_chi2_of_sequences_is_of_the_rows_product_whatever_its_length():
    # 1.5 * 2 = 3 over two tokens, 1.5 * 2 * 0.5 = 1.5 over three: (9 + 2.25) / 2 - 1.
    old = torch.tensor([[1.5, 2.0, torch.nan], [1.5, 2.0, 0.5]], dtype=torch.float64).log()
    metrics = mismatch_metrics(old, torch.zeros_like(old), torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert_near(metrics["chi2_sequence/mean"], 11.25 / 2 - 1, rtol=1e-9)


def test_a_token_that_is_not_finite_is_left_out_and_counted():
    old = torch.tensor([[-1.0, torch.nan, -2.0], [-1.0, -1.0, torch.inf]])
    rollout = torch.tensor([[-1.5, -1.0, -torch.inf], [-1.0, -1.0, -1.0]])
    metrics = mismatch_metrics(old, rollout, torch.ones(2, 3))
    assert_near(metrics["k1/mean"], -0.5 / 3)
    assert_near(metrics["chi2_sequence/mean"], (math.e - 1) / 2)
    assert (metrics["nonfinite/count"], metrics["tokens/count"], metrics["k1/count"]) == (3, 6, 3)
    assert all(metric.isfinite() for metric in metrics.values())


def test_nothing_to_watch_is_0_and_raises_nothing():
    # verl 0.9.1 raises an AssertionError on a mask of zeros.
    for shape in ((2, 3), (0, 3), (2, 0)):
        metrics = mismatch_metrics(torch.full(shape, torch.nan), torch.zeros(shape), torch.zeros(shape))
        assert metrics and all(metric == 0 for metric in metrics.values())


def test_far_policies_stay_finite():
    for sign in (1, -1):
        old = torch.full((2, 300), sign * 50.0)
        metrics = mismatch_metrics(old, torch.zeros(2, 300), torch.ones(2, 300))
        assert all(metric.isfinite() for metric in metrics.values())
        assert_near(metrics["abs_diff/mean"], 50.0)  # in nats, unclamped


def test_every_metric_is_a_detached_number_with_its_count():
    batch = ragged_batch()
    old = batch["old_log_prob"].requires_grad_()
    metrics = mismatch_metrics(old, batch["rollout_log_prob"].requires_grad_(), batch["response_mask"])
    for key, metric in metrics.items():
        name, _, kind = key.rpartition("/")
        assert kind in ("mean", "min", "max", "count") and f"{name}/count" in metrics
        assert metric.dim() == 0 and not metric.requires_grad and metric.dtype == torch.float32


def test_padding_and_row_order_change_nothing():
    batch = ragged_batch(dtype=torch.float64)
    words = [batch[word] for word in ("old_log_prob", "rollout_log_prob", "response_mask")]
    expected = mismatch_metrics(*words)
    order = torch.tensor([4, 0, 3, 2, 1])
    padded = [torch.nn.functional.pad(x[order], (0, 9), value=0 if x is words[2] else torch.nan) for x in words]
    torch.testing.assert_close(mismatch_metrics(*padded), expected, rtol=1e-12, atol=1e-12)


def test_equal_policies_do_not_differ():
    log_prob = ragged_batch()["old_log_prob"]
    metrics = mismatch_metrics(log_prob, log_prob, torch.ones(5, 7))
    for key in ("k1", "k3", "abs_diff", "prob_diff", "chi2_token", "chi2_sequence"):
        assert metrics[f"{key}/mean"] == 0
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1


def test_mismatch_errors_name_the_tensor():
    zero = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="^rollout_log_prob has shape"):
        mismatch_metrics(zero, torch.zeros(2, 4), zero)
    with pytest.raises(ValueError, match="^old_log_prob has shape"):
        mismatch_metrics(torch.zeros(2, 1), zero, zero)


def test_golden_effective_sample_size():
    assert_near(effective_sample_size(torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.ones(4)), 64 / (4 * 28))
    assert_near(effective_sample_size(torch.tensor([[1.0, 5.0], [1.0, 1.0]]), torch.ones(2, 2)), 64 / (4 * 28))
    assert_near(effective_sample_size(torch.tensor([2.0, 9.0, 2.0]), torch.tensor([1, 0, 1])), 1.0)
    assert_near(
        effective_sample_size(torch.tensor([3.0, 0.0, 0.0, 0.0]), torch.ones(4)), 0.25
    )  # a zero weight counts in n
    assert_near(effective_sample_size(torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([1, 0, 1])), 16 / (2 * 10))


def test_the_effective_sample_size_of_nothing_is_0():
    for weights, mask in (
        (torch.ones(3), torch.zeros(3)),
        (torch.zeros(3), torch.ones(3)),
        (torch.ones(0), torch.ones(0)),
    ):
        assert effective_sample_size(weights, mask) == 0


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_the_effective_sample_size_is_a_share_that_no_scale_changes(weights, scale):
    x = torch.tensor(weights, dtype=torch.float64)
    share = effective_sample_size(x, torch.ones(len(weights)))
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9
    assert_near(effective_sample_size(scale * x, torch.ones(len(weights))), share, rtol=1e-9)
    assert_near(effective_sample_size(torch.ones_like(x), torch.ones(len(weights))), 1.0, rtol=1e-9)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(st.just(0.0) | st.floats(1e-3, 10), min_size=1, max_size=5), min_size=1, max_size=4))
def test_sums_of_parts_give_the_share_of_the_whole(parts):
    whole = torch.tensor(sum(parts, []), dtype=torch.float64)
    sums = [torch.tensor([sum(p), sum(x * x for x in p), len(p)], dtype=torch.float64) for p in parts]
    assert_near(effective_share(*sum(sums)), effective_sample_size(whole, torch.ones(len(whole))), rtol=1e-9)


@pytest.mark.parametrize("scale", [1e20, 1e-25])
def test_the_share_does_not_depend_on_the_scale(scale):
    assert_near(effective_sample_size(torch.tensor([1.0, 1.0, 1.0, 5.0]) * scale, torch.ones(4)), 64 / 112, rtol=1e-6)


def test_effective_sample_size_refuses_a_mask_that_does_not_broadcast():
    for mask in (torch.ones(4), torch.ones(2, 3)):
        with pytest.raises(ValueError, match="does not broadcast"):
            effective_sample_size(torch.ones(3), mask)
    assert_near(effective_sample_size(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.tensor([[True], [False]])), 9 / 10)
    assert effective_sample_size(torch.ones(3, dtype=torch.bfloat16), torch.ones(3)).dtype == torch.float32
    assert not effective_sample_size(torch.ones(3, requires_grad=True), torch.ones(3)).requires_grad
