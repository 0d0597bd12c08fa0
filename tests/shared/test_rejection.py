"""Rejection: every statistic by hand, inclusive bounds, the veto, what a length does, metrics, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near, ragged_batch
from trimtab.correction import STATISTICS, rejection_mask

ROLLOUT = -1.5
SEQUENCE = [statistic for statistic in STATISTICS if statistic != "token_ratio"]
RATIOS = [statistic for statistic in STATISTICS if statistic not in ("sequence_max_k2", "sequence_mean_k3")]


def keep(ratios, mask=None, *, dtype=torch.float64, **keys):
    """What is kept, as 0 and 1, and the metrics, for rows of old/rollout; a rollout log-prob is -1.5 everywhere."""
    ratios = torch.tensor(ratios, dtype=dtype)
    rollout = torch.full_like(ratios, ROLLOUT)
    mask = torch.ones(ratios.shape) if mask is None else torch.tensor(mask)
    kept, metrics = rejection_mask(rollout + ratios.log(), rollout, mask, **keys)
    assert kept.dtype == torch.bool and not kept.requires_grad
    return kept.int().tolist(), metrics


# Of (1.2, 1.5, 1.2): product 2.16, geometric mean 2.16^(1/3) = 1.2927, largest k2 log(1.5)^2 / 2 = 0.0822, mean k3
# (1.2 + 1.5 + 1.2 - 3 - log 2.16) / 3 = 0.0433. Of (0.5, 0.9): 0.45, 0.6708, 0.2402, (-0.6 - log 0.45) / 2 = 0.0993.
GOLDEN = {
    "sequence_product": (2.16, 0.45),
    "sequence_geometric": (2.16 ** (1 / 3), 0.45**0.5),
    "sequence_max_k2": (math.log(1.5) ** 2 / 2, math.log(2) ** 2 / 2),
    "sequence_mean_k3": ((0.9 - math.log(2.16)) / 3, (-0.6 - math.log(0.45)) / 2),
}


@pytest.mark.parametrize("statistic", SEQUENCE)
def test_golden_sequence_statistics(statistic):
    first, second = GOLDEN[statistic]
    ratios, mask = [[1.2, 1.5, 1.2], [0.5, 0.9, 30.0]], [[1, 1, 1], [1, 1, 0]]
    both, only_first, only_second, none = ([[a] * 3, [b, b, 0]] for a, b in ((1, 1), (1, 0), (0, 1), (0, 0)))
    kept, metrics = keep(ratios, mask, statistic=statistic)
    assert kept == both
    assert_near(metrics["statistic/mean"], (first + second) / 2, rtol=1e-9)  # over rows, not over their five tokens
    assert_near(metrics["statistic/max"], max(first, second), rtol=1e-9)
    assert_near(metrics["statistic/min"], min(first, second), rtol=1e-9)
    assert (metrics["statistic/count"], metrics["tokens/count"], metrics["kept/count"]) == (2, 5, 5)
    low, high = min(first, second), max(first, second)
    larger, smaller = (only_first, only_second) if first > second else (only_second, only_first)
    assert keep(ratios, mask, statistic=statistic, high=high * 1.001)[0] == both
    assert keep(ratios, mask, statistic=statistic, high=high * 0.999)[0] == smaller
    assert keep(ratios, mask, statistic=statistic, high=low * 0.999)[0] == none
    if statistic in RATIOS:
        assert keep(ratios, mask, statistic=statistic, low=low * 0.999, high=9.0)[0] == both
        assert keep(ratios, mask, statistic=statistic, low=low * 1.001, high=9.0)[0] == larger
        assert keep(ratios, mask, statistic=statistic, low=high * 1.001)[0] == none


def test_golden_presets():
    # The cap of 2 on a product of 2.16, and verl's presets for the geometric mean: the whole answer goes.
    ratios = [[1.2, 1.5, 1.2]]
    assert keep(ratios, statistic="sequence_product", high=2.0)[0] == [[0, 0, 0]]
    assert keep(ratios, statistic="sequence_geometric", low=0.999, high=1.001)[0] == [[0, 0, 0]]
    assert keep(ratios, statistic="sequence_geometric", low=0.5, high=2.0)[0] == [[1, 1, 1]]


def test_golden_token_ratio_has_the_bounds_of_icepop():
    kept, metrics = keep([[0.49, 0.5, 1.3, 5.0, 5.01]], statistic="token_ratio", low=0.5, high=5.0)
    assert kept == [[0, 1, 1, 1, 0]]
    assert_near(metrics["kept/mean"], 3 / 5)
    assert_near(metrics["statistic/mean"], 12.3 / 5)
    assert metrics["kept_rows/mean"] == 1 and metrics["statistic/count"] == 5


def test_bounds_hold_for_old_over_rollout():
    # verl 0.9.1, token_k1 with "0.5_5.0", keeps [1, 1, 1, 1, 0, 0] here: its bounds act on the inverse.
    ratios = [[0.3, 0.6, 1.0, 1.8, 3.0, 4.5]]
    assert keep(ratios, statistic="token_ratio", low=0.5, high=5.0)[0] == [[0, 1, 1, 1, 1, 1]]
    for statistic in RATIOS:
        assert keep([[4.0], [0.25]], statistic=statistic, low=0.5, high=5.0)[0] == [[1], [0]]
    # k3 of 4 is 3 - log 4 = 1.61, of 1/4 it is log 4 - 0.75 = 0.64; k2 is the same for both.
    assert keep([[4.0], [0.25]], statistic="sequence_mean_k3", high=1.0)[0] == [[0], [1]]
    assert keep([[4.0], [0.25]], statistic="sequence_max_k2", high=0.96)[0] == [[0], [0]]
    assert keep([[4.0], [0.25]], statistic="sequence_max_k2", high=0.97)[0] == [[1], [1]]


def test_the_band_drops_three_of_five():
    # https://github.com/verl-project/verl/pull/3915; what the denominator becomes is tested with the objective.
    ratios = [[math.exp(x) for x in (0.1, -1.5, 0.8, -10.0, 0.3)]]
    kept, metrics = keep(ratios, statistic="token_ratio", low=0.5, high=2.0)
    assert kept == [[1, 0, 0, 0, 1]]
    assert_near(metrics["kept/mean"], 2 / 5)


@pytest.mark.parametrize("rollout", [0.0, -0.3, -1.0, -1.7, -3.0])
@pytest.mark.parametrize("ratio", [0.5, 5.0, 2.0, 0.8, 1.28, 0.999, 1.001, 1e-4])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_bounds_are_inclusive_in_float32(statistic, ratio, rollout):
    log = math.log(ratio)
    value = {"sequence_max_k2": log**2 / 2, "sequence_mean_k3": ratio - 1 - log}.get(statistic, ratio)
    anchor = torch.full((1, 1), rollout)
    old = anchor + torch.full((1, 1), ratio).log()
    bounds = [{"high": value}] + ([{"low": value}, {"low": value, "high": value}] if statistic in RATIOS else [])
    for keys in bounds:
        assert rejection_mask(old, anchor, torch.ones(1, 1), statistic=statistic, **keys)[0].all()


@pytest.mark.parametrize("ratio", [0.5, 2.0, 1.28])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_what_is_beyond_a_bound_by_more_than_rounding_goes(statistic, ratio):
    log = math.log(ratio)
    value = {"sequence_max_k2": log**2 / 2, "sequence_mean_k3": ratio - 1 - log}.get(statistic, ratio)
    for dtype, margin in ((torch.float32, 1e-4), (torch.float64, 1e-12)):
        assert keep([[ratio]], statistic=statistic, dtype=dtype, high=value * (1 - margin))[0] == [[0]]
        if statistic in RATIOS:
            assert keep([[ratio]], statistic=statistic, dtype=dtype, low=value * (1 + margin))[0] == [[0]]


@pytest.mark.parametrize("statistic", RATIOS)
def test_no_bound_is_none_or_0(statistic):
    for keys in ({}, {"low": 0.0}, {"low": None, "high": None}, {"low": 0, "high": 1e6}):
        assert keep([[1e-9, 3.0], [1e-9, 1e-9]], statistic=statistic, **keys)[0] == [[1, 1], [1, 1]]


# The veto.


@pytest.mark.parametrize("statistic", STATISTICS)
def test_one_token_under_the_veto_drops_its_row(statistic):
    ratios = [[1.0, 9e-5, 1.0], [1.0, 1.1e-4, 1.0], [1.0, 1.0, 1.0]]
    kept, metrics = keep(ratios, statistic=statistic, veto=1e-4)
    assert kept == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert_near(metrics["veto/mean"], 1 / 3)
    assert_near(metrics["kept_rows/mean"], 2 / 3)
    kept, metrics = keep(ratios, statistic=statistic)
    assert kept == [[1, 1, 1]] * 3 and "veto/mean" not in metrics


def test_the_veto_sees_what_a_sequence_statistic_hides():
    # 5e-5 and 2e4 make a product of 1. A ratio above 1, however large, is no veto's matter, and on its bound it stays.
    assert keep([[5e-5, 2e4]], statistic="sequence_product", low=0.9, high=1.1)[0] == [[1, 1]]
    assert keep([[5e-5, 2e4]], statistic="sequence_product", low=0.9, high=1.1, veto=1e-4)[0] == [[0, 0]]
    assert keep([[1.0, 1e9]], statistic="token_ratio", veto=1e-4)[0] == [[1, 1]]
    for dtype in (torch.float32, torch.float64):
        assert keep([[1.0, 1e-4]], statistic="token_ratio", veto=1e-4, dtype=dtype)[0] == [[1, 1]]


def test_the_veto_is_compared_unclamped():
    # e^-30 is under 1e-10 = e^-23.03; clamped to e^-20 it would pass. e^-22 is above it.
    log_ratio = torch.tensor([[-30.0, 0.0], [-22.0, 0.0]])
    kept, _ = rejection_mask(log_ratio, torch.zeros(2, 2), torch.ones(2, 2), statistic="token_ratio", veto=1e-10)
    assert kept.tolist() == [[False, False], [True, True]]


def test_neither_a_masked_nor_a_removed_token_vetoes():
    ratios = [[1.0, 1e-9, 1.0], [1.0, math.nan, 1.0]]
    kept, metrics = keep(ratios, [[1, 0, 1], [1, 1, 1]], statistic="sequence_geometric", low=0.5, high=2.0, veto=1e-4)
    assert kept == [[1, 0, 1], [1, 0, 1]]
    assert (metrics["veto/mean"], metrics["veto/count"], metrics["nonfinite/count"]) == (0, 2, 1)


def test_a_row_with_a_vetoed_token_goes_even_where_tokens_are_judged_alone():
    kept, metrics = keep([[1.0, 1e-5, 3.0], [1.0, 0.3, 3.0]], statistic="token_ratio", low=0.5, high=2.0, veto=1e-4)
    assert kept == [[0, 0, 0], [1, 0, 0]]
    assert_near(metrics["kept/mean"], 1 / 6)
    assert_near(metrics["kept_rows/mean"], 1 / 2)


# Lengths, and ratios far away.


def test_the_length_trap_of_the_product():
    # +0.005 a token: at 1000 tokens the product is e^5 = 148, above a cap of 3; the geometric mean is 1.005.
    ratios = [[math.exp(0.005)] * 1000]
    kept, metrics = keep(ratios, statistic="sequence_product", high=3.0)
    assert not any(kept[0]) and metrics["kept_rows/mean"] == 0
    assert_near(metrics["statistic/mean"], math.exp(5), rtol=1e-9)
    kept, metrics = keep(ratios, statistic="sequence_geometric", high=3.0)
    assert all(kept[0])
    assert_near(metrics["statistic/mean"], math.exp(0.005), rtol=1e-9)
    assert all(keep([ratios[0][:50]], statistic="sequence_product", high=3.0)[0][0])


def test_product_and_geometric_mean_report_what_they_are():
    # https://github.com/huggingface/trl/issues/5814: the same answers have a mean of 0.569 by one word and of 0.993 by
    # the other. 0.993^80 = 0.570.
    ratios = [[0.993] * 80]
    kept, metrics = keep(ratios, statistic="sequence_product", low=0.6, high=2.0)
    assert not any(kept[0])
    assert_near(metrics["statistic/mean"], 0.993**80, rtol=1e-9)
    kept, metrics = keep(ratios, statistic="sequence_geometric", low=0.6, high=2.0)
    assert all(kept[0])
    assert_near(metrics["statistic/mean"], 0.993, rtol=1e-9)


def test_three_hundred_tokens_at_0_7():
    # 0.7^300 = e^-107, which float32 rounds to 0: bounds beyond it, and beyond its inverse, still tell.
    # https://github.com/huggingface/trl/pull/7120
    for sign in (1, -1):
        log_ratio = sign * torch.full((1, 300), math.log(0.7))
        for exponent, inside in ((-45, False), (-48, True)):  # e^-103.6 and e^-110.5
            bound = {"low": 10.0**exponent} if sign > 0 else {"high": 10.0**-exponent}
            kept, metrics = rejection_mask(
                log_ratio, torch.zeros(1, 300), torch.ones(1, 300), statistic="sequence_product", **bound
            )
            assert kept.all() if inside else not kept.any()
            assert all(metric.isfinite() for metric in metrics.values())
            assert_near(metrics["statistic/mean"], math.exp(-20 * sign), rtol=1e-5, atol=0)
        geometric = {"statistic": "sequence_geometric", "low": 0.6, "high": 1.6}
        assert rejection_mask(log_ratio, torch.zeros(1, 300), torch.ones(1, 300), **geometric)[0].all()


def test_the_share_of_answers_that_are_dropped_is_reported():
    # https://github.com/huggingface/trl/issues/4772: a product over 100 tokens is above a cap of 3 for many answers.
    ratios = [[math.exp(mean)] * 100 for mean in (-0.02, 0.0, 0.012, 0.02)]  # products 0.14, 1, 3.3, 7.4
    _, metrics = keep(ratios, statistic="sequence_product", high=3.0)
    assert_near(metrics["kept_rows/mean"], 1 / 2)
    assert metrics["kept_rows/count"] == 4
    _, metrics = keep(ratios, statistic="sequence_geometric", high=3.0)
    assert metrics["kept_rows/mean"] == 1


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_stale_token_is_dropped_and_leaves_no_nan(statistic):
    # https://github.com/OpenRLHF/OpenRLHF/issues/1295: 99.9 nats.
    old, rollout = torch.tensor([[-0.1, -1.0], [-1.0, -1.0]]), torch.tensor([[-100.0, -1.0], [-1.0, -1.0]])
    kept, metrics = rejection_mask(old, rollout, torch.ones(2, 2), statistic=statistic, high=2.0)
    assert kept.tolist() == [[False, statistic == "token_ratio"], [True, True]]
    assert all(metric.isfinite() for metric in metrics.values())


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_removed_token_leaves_the_statistic_of_its_row(statistic):
    # 1.2 and NaN, or NaN and 1.2: what remains decides, over one token.
    high = {"sequence_max_k2": 0.017, "sequence_mean_k3": 0.018}.get(statistic, 1.21)  # of 1.2: 0.0166, 0.0177, 1.2
    tight = {"sequence_max_k2": 0.016, "sequence_mean_k3": 0.017}.get(statistic, 1.19)
    ratios = [[1.2, math.nan], [math.nan, 1.2], [math.nan, math.nan]]
    kept, metrics = keep(ratios, statistic=statistic, high=high)
    assert kept == [[1, 0], [0, 1], [0, 0]]
    assert (metrics["nonfinite/count"], metrics["tokens/count"], metrics["statistic/count"]) == (4, 6, 2)
    assert_near(metrics["kept/mean"], 2 / 6)
    assert keep(ratios, statistic=statistic, high=tight)[0] == [[0, 0]] * 3


def scalar(statistic, logs):
    """The statistic of each token of a row, from its live log ratios."""
    row = {
        "sequence_product": lambda: math.exp(sum(logs)),
        "sequence_geometric": lambda: math.exp(sum(logs) / len(logs)),
        "sequence_max_k2": lambda: max(x * x / 2 for x in logs),
        "sequence_mean_k3": lambda: sum(math.exp(x) - 1 - x for x in logs) / len(logs),
    }
    return [math.exp(x) for x in logs] if statistic == "token_ratio" else [row[statistic]()] * len(logs)


@settings(deadline=None, derandomize=True)
@given(
    st.integers(0, 9999),
    st.sampled_from(STATISTICS),
    st.floats(0.3, 0.97),
    st.floats(0.01, 2),
    st.one_of(st.none(), st.floats(0.1, 0.8)),
)
def test_equals_a_loop_over_the_rows(seed, statistic, low, high, veto):
    batch = ragged_batch(dtype=torch.float64, seed=seed)
    old, rollout, mask = 2 * batch["old_log_prob"], 2 * batch["rollout_log_prob"], batch["response_mask"]
    bounds = {"low": low, "high": 1 + high} if statistic in RATIOS else {"high": high}
    kept, metrics = rejection_mask(old, rollout, mask, statistic=statistic, veto=veto, **bounds)
    expected = torch.zeros_like(kept)
    for i in range(len(mask)):
        live = mask[i].bool()
        if live.any():
            logs = (old - rollout)[i, live].tolist()
            inside = [bounds.get("low", 0) <= x <= bounds["high"] for x in scalar(statistic, logs)]
            vetoed = veto is not None and min(logs) < math.log(veto)
            expected[i, live] = torch.tensor(inside) & (not vetoed)
    assert torch.equal(kept, expected)
    live = mask.bool()
    assert_near(metrics["kept/mean"], expected[live].float().mean())
    assert_near(metrics["kept_rows/mean"], expected.any(dim=1)[live.any(dim=1)].float().mean())
    if statistic != "token_ratio":
        assert torch.equal(kept, live & kept.any(dim=1, keepdim=True))  # all of a row or nothing


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"statistic": "sequence"}, "^statistic: 'sequence' is unknown; one of token_ratio, sequence_product"),
        ({"statistic": "token_k1"}, "^statistic: 'token_k1' is unknown"),
        ({"statistic": "sequence_mean_k3", "low": 0.5}, "^low: 0.5 has no meaning for sequence_mean_k3"),
        ({"statistic": "sequence_max_k2", "low": 0.0}, "^low: 0.0 has no meaning for sequence_max_k2"),
        ({"statistic": "token_ratio", "low": -0.5}, "^low: -0.5"),
        ({"statistic": "token_ratio", "low": math.nan}, "^low: nan"),
        ({"statistic": "token_ratio", "high": 0.0}, "^high: 0.0"),
        ({"statistic": "sequence_mean_k3", "high": -1.0}, "^high: -1.0"),
        ({"statistic": "token_ratio", "low": 3.0, "high": 2.0}, "^low: 3.0 is above high: 2.0"),
        ({"statistic": "token_ratio", "veto": 0.0}, "^veto: 0.0"),
        ({"statistic": "token_ratio", "veto": math.nan}, "^veto: nan"),
    ],
)
def test_errors_name_what_is_wrong(keys, message):
    with pytest.raises(ValueError, match=message):
        keep([[1.0]], **keys)


def test_the_statistic_has_no_default():
    with pytest.raises(TypeError, match="statistic"):
        keep([[1.0]])
