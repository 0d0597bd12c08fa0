"""Importance weights: by hand at every level and bound, inclusive bounds, normalisation, metrics, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near, ragged_batch
from trimtab.correction import BOUNDS, importance_weights
from trimtab.ratios import LEVELS, SEQUENCE_LEVELS

ROLLOUT = -1.5


def weights(ratios, mask=None, *, dtype=torch.float32, **keys):
    """Weights and metrics for rows of old/rollout ratios; a rollout log-prob is -1.5 everywhere."""
    ratios = torch.tensor(ratios, dtype=dtype)
    rollout = torch.full_like(ratios, ROLLOUT)
    mask = torch.ones(ratios.shape) if mask is None else torch.tensor(mask)
    return importance_weights(rollout + ratios.log(), rollout, mask, **keys)


def test_golden_truncate_is_tis():
    # Cap 2: 3 becomes 2, 0.1 stays: no floor.
    assert_near(weights([[3.0, 0.1, 1.9, 2.0]], high=2.0)[0], [[2.0, 0.1, 1.9, 2.0]])
    assert_near(
        weights([[3.0, 0.1, 1.9]])[0], [[2.0, 0.1, 1.9]]
    )  # 2 is the default, token the level, truncate the bound


def test_golden_truncate_with_a_floor():
    assert_near(weights([[3.0, 0.1, 1.9, 0.7]], low=0.6, high=2.5)[0], [[2.5, 0.6, 1.9, 0.7]])


def test_golden_mask_is_icepop():
    ratios = [[0.49, 0.5, 1.3, 5.0, 5.01]]
    result, metrics = weights(ratios, bound="mask", low=0.5, high=5.0)
    assert_near(result, [[0.0, 0.5, 1.3, 5.0, 0.0]])  # inside the bounds the ratio itself, not 1
    assert_near(metrics["outside/mean"], 2 / 5)


@pytest.mark.parametrize("rollout", [0.0, -0.3, -1.0, -1.7, -3.0])
@pytest.mark.parametrize(
    "bound", [0.5, 5.0, 2.0, 0.125, 8.0, 0.8, 1.2, 1.28, 0.99, 1.01, 0.999, 1.001, 1e-4, 1.5, 100.0]
)
def test_bounds_are_inclusive_in_float32(bound, rollout):
    """A ratio equal to the bound up to the rounding of its own log-probs stays, and does not exceed it."""
    for width in (1, 33):  # vectorised or not
        anchor = torch.full((1, width), rollout)
        old = anchor + torch.full((1, width), bound).log()
        for keys in ({"low": bound, "high": 1e3}, {"low": 1e-6, "high": bound}, {"low": bound, "high": bound}):
            result, metrics = importance_weights(old, anchor, torch.ones(1, width), bound="mask", **keys)
            assert_near(result, torch.full((1, width), bound), rtol=2e-6)
            assert metrics["outside/mean"] == 0
            assert (result <= torch.tensor(keys["high"])).all() and (result >= torch.tensor(keys["low"])).all()


@pytest.mark.parametrize("bound", [0.5, 5.0, 1.01, 1e-4])
def test_what_is_beyond_a_bound_by_more_than_rounding_goes(bound):
    for dtype, margin in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        above = weights([[bound * (1 + margin)]], dtype=dtype, bound="mask", low=1e-6, high=bound)[0]
        below = weights([[bound * (1 - margin)]], dtype=dtype, bound="mask", low=bound, high=1e3)[0]
        assert above == 0 and below == 0


def test_golden_levels():
    # (1.2, 1.5, 1.2): product 2.16, geometric 2.16^(1/3) = 1.2927, prefixes 1.2, 1.8, 2.16, minima 1: 1.2, 1.5, 1.2.
    ratios = [[1.2, 1.5, 1.2]]
    expected = {
        "token": [1.2, 1.5, 1.2],
        "sequence_product": [2.16] * 3,
        "sequence_geometric": [2.16 ** (1 / 3)] * 3,
        "prefix_product": [1.2, 1.8, 2.16],
        "prefix_min": [1.2, 1.5, 1.2],
    }
    for level, values in expected.items():
        assert_near(weights(ratios, level=level, high=None)[0], [values], rtol=1e-6)
    # Seq-MIS with C = 2, seq-TIS, and a geometric band.
    assert_near(weights(ratios, level="sequence_product", bound="mask", high=2.0)[0], [[0.0] * 3])
    assert_near(weights(ratios, level="sequence_product", high=2.0)[0], [[2.0] * 3])
    band = {"bound": "mask", "low": 0.999, "high": 1.001}
    assert_near(weights(ratios, level="sequence_geometric", **band)[0], [[0.0] * 3])
    assert_near(weights(ratios, level="prefix_product", bound="mask", high=2.0)[0], [[1.2, 1.8, 0.0]], rtol=1e-6)
    assert_near(weights([[0.9, 1.2, 0.5, 1.1]], level="prefix_min", low=0.5)[0], [[0.9, 1.08, 0.5, 0.55]], rtol=1e-6)


def test_the_sequence_level_is_over_live_tokens_and_repeats_on_them():
    mask = [[1, 0, 1, 0], [1, 1, 1, 1]]
    result, _ = weights([[1.5, 9.0, 0.8, 9.0], [1.0, 1.0, 1.0, 0.5]], mask, level="sequence_product", high=4.0)
    assert_near(result, [[1.2, 0.0, 1.2, 0.0], [0.5] * 4], rtol=1e-6)


def test_bounds_hold_for_old_over_rollout():
    # https://github.com/verl-project/verl (0.9.1, token_k1 with "0.5_5.0") keeps [1, 1, 1, 1, 0, 0] here: the inverse.
    ratios = [[0.3, 0.6, 1.0, 1.8, 3.0, 4.5]]
    assert_near(weights(ratios, bound="mask", low=0.5, high=5.0)[0], [[0.0, 0.6, 1.0, 1.8, 3.0, 4.5]])


def test_no_low_bound_is_none_or_0_and_no_high_bound_is_none():
    ratios = [[1e-7, 1.0, 1e5]]
    for low in (None, 0, 0.0):
        assert_near(weights(ratios, bound="mask", low=low, high=1e6)[0], ratios, rtol=1e-5)
        assert_near(weights(ratios, low=low, high=None)[0], ratios, rtol=1e-5)


def test_a_stale_token_gives_a_bounded_weight_and_no_nan():
    # https://github.com/OpenRLHF/OpenRLHF/issues/1295 and https://github.com/PrimeIntellect-ai/prime-rl/pull/2084:
    # exp(99) is inf, and 0 * inf NaN. Clamped, its exponent is 20.
    old, rollout = torch.tensor([[-0.1, -1.0]]), torch.tensor([[-100.0, -1.0]])
    assert_near(importance_weights(old, rollout, torch.ones(1, 2), high=2.0)[0], [[2.0, 1.0]])
    assert_near(importance_weights(old, rollout, torch.ones(1, 2), bound="mask", high=2.0)[0], [[0.0, 1.0]])
    assert_near(importance_weights(old, rollout, torch.ones(1, 2), high=None)[0], [[math.exp(20), 1.0]], rtol=1e-5)
    assert_near(
        importance_weights(rollout, old, torch.ones(1, 2), high=None)[0], [[math.exp(-20), 1.0]], rtol=1e-5, atol=0
    )
    for level in LEVELS:
        dead = importance_weights(old, rollout, torch.tensor([[0, 1]]), level=level, high=None)[0]
        assert_near(dead, [[0.0, 1.0]])


def test_three_hundred_tokens_at_0_7():
    # 0.7^300 = exp(-107): dividing by it overflows. The exponent is clamped once, after the sum: not 300 clamped ones.
    ratios = torch.full((1, 300), 0.7)
    one = torch.ones(1, 300)
    down, _ = importance_weights(ratios.log(), torch.zeros(1, 300), one, level="sequence_product", high=2.0)
    assert_near(down, torch.full((1, 300), math.exp(-20)), rtol=1e-5, atol=0)
    up, _ = importance_weights(torch.zeros(1, 300), ratios.log(), one, level="sequence_product", high=2.0)
    assert_near(up, torch.full((1, 300), 2.0))
    # -30 and +25 nats sum to -5; clamped one by one they would cancel.
    old, zero = torch.tensor([[-30.0, 25.0]]), torch.zeros(1, 2)
    both, _ = importance_weights(old, zero, torch.ones(1, 2), level="sequence_product", high=None)
    assert_near(both, torch.full((1, 2), math.exp(-5)), rtol=1e-5)


def test_the_length_trap_of_the_product_level():
    # +0.005 a token: at 1000 tokens the product is e^5 = 148, above a cap of 3; the geometric mean is 1.005.
    old = torch.full((1, 1000), 0.005)
    zero, one = torch.zeros(1, 1000), torch.ones(1, 1000)
    product, _ = importance_weights(old, zero, one, level="sequence_product", bound="mask", high=3.0)
    geometric, _ = importance_weights(old, zero, one, level="sequence_geometric", bound="mask", high=3.0)
    assert (product == 0).all()
    assert_near(geometric, torch.full((1, 1000), math.exp(0.005)), rtol=1e-5)
    assert_near(
        importance_weights(old[:, :50], zero[:, :50], one[:, :50], level="sequence_product", high=3.0)[0][0, 0],
        1.284025,
    )


def test_metrics_before_and_after_the_bound():
    # https://github.com/NVIDIA-NeMo/RL/pull/3900: the mean after truncation, 2.14, hides the one before, 4.54.
    _, metrics = weights([[0.607, 12.18, 0.819]], high=5.0)
    assert_near(metrics["ratio/mean"], 13.606 / 3, rtol=1e-5)
    assert_near(metrics["ratio/max"], 12.18, rtol=1e-5)
    assert_near(metrics["weight/mean"], 6.426 / 3, rtol=1e-5)
    assert_near(metrics["weight/max"], 5.0)
    assert_near(metrics["weight/min"], 0.607, rtol=1e-5)
    assert_near(metrics["outside/mean"], 1 / 3)
    assert (metrics["weight/count"], metrics["outside/count"], metrics["tokens/count"]) == (3, 3, 3)


def test_normalize_by_hand_over_tokens():
    # 0.5, 1, 2 (from 3): mean 7/6; 2 / (7/6) = 12/7 is under the cap of 2.
    assert_near(weights([[0.5, 1.0, 3.0]], normalize=True)[0], [[3 / 7, 6 / 7, 12 / 7]])
    # 0.1, 0.1, 2: mean 2.2 / 3; 2 / 0.7333 = 2.727 is truncated to 2 again.
    assert_near(weights([[0.1, 0.1, 3.0]], normalize=True)[0], [[0.1 * 3 / 2.2, 0.1 * 3 / 2.2, 2.0]])
    # Without a cap nothing is truncated. 0.1, 0.1, 3: mean 3.2 / 3.
    assert_near(weights([[0.1, 0.1, 3.0]], high=None, normalize=True)[0], [[0.3 / 3.2, 0.3 / 3.2, 9 / 3.2]])
    # A floor of 0.5 acts before and not after: 0.5, 2, 2 with mean 1.5.
    assert_near(weights([[0.1, 3.0, 3.0]], low=0.5, normalize=True)[0], [[1 / 3, 4 / 3, 4 / 3]])
    # What the bound zeroed counts in the mean: 0, 1, 4 over 3.
    assert_near(weights([[0.49, 1.0, 4.0]], bound="mask", low=0.5, high=5.0, normalize=True)[0], [[0.0, 0.6, 2.4]])
    # So does what was removed: 1 and 2 over 3 tokens; a masked token does not.
    assert_near(weights([[1.0, 2.0, math.nan]], normalize=True)[0], [[1.0, 2.0, 0.0]])
    assert_near(weights([[1.0, 2.0, 9.0]], [[1, 1, 0]], normalize=True)[0], [[2 / 3, 4 / 3, 0.0]])


def test_normalize_by_hand_over_rows_at_a_sequence_level():
    ratios, mask = [[1.6, 1.25], [0.5, 9.0], [9.0, 9.0]], [[1, 1], [1, 0], [0, 0]]
    # Products 2 and 0.5 over two rows: mean 1.25. Over the three tokens it would be 1.5.
    assert_near(
        weights(ratios, mask, level="sequence_product", normalize=True)[0], [[1.6, 1.6], [0.4, 0.0], [0.0, 0.0]]
    )
    # Geometric: sqrt(2) and 0.5.
    mean = (math.sqrt(2) + 0.5) / 2
    expected = [[math.sqrt(2) / mean] * 2, [0.5 / mean, 0.0], [0.0, 0.0]]
    assert_near(weights(ratios, mask, level="sequence_geometric", normalize=True)[0], expected, rtol=1e-5)
    # A row that was removed whole counts, and so does one that the bound zeroed: 1.2 / 3.
    ratios = [[math.nan], [9.0], [1.2]]
    result, _ = weights(ratios, level="sequence_product", bound="mask", high=5.0, normalize=True)
    assert_near(result, [[0.0], [0.0], [3.0]])
    # A prefix level is normalised over tokens: 1, 2 with mean 1.5.
    assert_near(weights([[1.0, 2.0]], level="prefix_product", normalize=True)[0], [[2 / 3, 4 / 3]])


def test_a_removed_token_leaves_the_weight_of_its_row_in_the_mean():
    # Row 0: NaN, then 0.5; row 1: 1.5. Mean 1, whichever token of row 0 was removed.
    for row in ([math.nan, 0.5], [0.5, math.nan]):
        result, _ = weights([row, [1.5, 1.0]], level="sequence_product", normalize=True)
        assert_near(result, [[0.0 if math.isnan(x) else 0.5 for x in row], [1.5, 1.5]])


def test_a_given_mean_takes_the_place_of_the_batchs():
    for mean in (4.0, torch.tensor(4.0), torch.tensor(4.0, dtype=torch.float64)):
        for normalize in (True, False):
            result, metrics = weights([[0.5, 1.0, 3.0]], normalize=normalize, mean=mean)
            assert result.dtype == torch.float32
            assert_near(result, [[0.125, 0.25, 0.5]])
            assert_near(metrics["weight/mean"], 0.875 / 3)
    assert_near(weights([[0.5, 1.0]], mean=0.25)[0], [[2.0, 2.0]])  # 4 truncated to 2
    assert_near(weights([[0.5, 1.0]], mean=0.0)[0], [[0.0, 0.0]])


def test_normalizing_nothing_gives_0():
    result, metrics = weights([[9.0, 9.0]], bound="mask", normalize=True)
    assert_near(result, [[0.0, 0.0]])
    assert metrics["weight/mean"] == 0
    for level in LEVELS:
        assert_near(weights([[1.0, 2.0]], [[0, 0]], level=level, normalize=True)[0], [[0.0, 0.0]])
        assert weights([[], []], level=level, normalize=True)[0].shape == (2, 0)


@settings(deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.sampled_from(LEVELS),
    st.sampled_from(BOUNDS),
    st.floats(0.05, 0.95),
    st.floats(1.05, 5),
    st.booleans(),
)
def test_weights_lie_within_the_bounds(seed, level, bound, low, high, normalize):
    batch = ragged_batch(seed=seed)
    old, rollout, mask = 4 * batch["old_log_prob"], 4 * batch["rollout_log_prob"], batch["response_mask"]
    keys = {"level": level, "bound": bound, "low": low, "high": high}
    plain, metrics = importance_weights(old, rollout, mask, **keys)
    live = mask.bool()
    assert (plain[~live] == 0).all() and (plain <= torch.tensor(high)).all()
    kept = plain[live & (plain > 0)]
    assert (kept >= torch.tensor(low)).all()
    if bound == "truncate":
        assert (plain[live] > 0).all()
    else:
        assert_near(metrics["outside/mean"], (plain[live] == 0).float().mean())
    result, _ = importance_weights(old, rollout, mask, **keys, normalize=normalize)
    assert (result <= torch.tensor(high)).all()
    if normalize and (plain > 0).any():
        if level in SEQUENCE_LEVELS:
            mean = plain.amax(dim=1)[live.any(dim=1)].double().mean()
        else:
            mean = plain[live].double().mean()
        assert_near(result, (plain.double() / mean).clamp(max=high), rtol=1e-5)


def test_weights_carry_no_gradient():
    old, rollout = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    for normalize in (True, False):
        result, metrics = importance_weights(old, rollout, torch.ones(2, 3), normalize=normalize)
        assert not result.requires_grad and not any(metric.requires_grad for metric in metrics.values())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"level": "sequence"}, "^level: 'sequence' is unknown; one of token, sequence_product"),
        ({"bound": "clip"}, "^bound: 'clip' is unknown; one of truncate, mask"),
        ({"low": -0.5}, "^low: -0.5"),
        ({"low": math.nan}, "^low: nan"),
        ({"high": 0.0}, "^high: 0.0"),
        ({"high": -2.0}, "^high: -2.0"),
        ({"low": 3.0, "high": 2.0}, "^low: 3.0 is above high: 2.0"),
    ],
)
def test_errors_name_what_is_wrong(keys, message):
    with pytest.raises(ValueError, match=message):
        weights([[1.0]], **keys)
