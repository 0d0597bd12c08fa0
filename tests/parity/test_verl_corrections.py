"""Our weights and rejection masks against verl's rollout correction; and where ours differs on purpose."""

import math

import pytest
import torch

from tests.parity import verl_reference as verl
from tests.parity.verl_reference import assert_equal
from trimtab.correction import importance_weights, rejection_mask
from trimtab.diagnostics import effective_sample_size, mismatch_metrics

pytestmark = pytest.mark.slow  # importing verl takes ten seconds

LEVELS = {"token": "token", "sequence": "sequence_product"}
BOUNDS = {
    "truncate": (1.3, {"bound": "truncate", "high": 1.3}),
    "icepop": ("0.6_1.4", {"bound": "mask", "low": 0.6, "high": 1.4}),
}


@pytest.fixture(autouse=True, scope="module")
def needs_verl():
    verl.load("rollout_corr_helper")


def policies(batch):
    return batch["old_log_prob"], batch["rollout_log_prob"], batch["response_mask"]


def their_weights(batch, level, threshold, **options):
    return verl.correction(batch, rollout_is=level, rollout_is_threshold=threshold, **options)[0]


def their_mask(batch, statistic, threshold):
    return verl.correction(batch, rollout_rs=statistic, rollout_rs_threshold=threshold)[1].bool()


def our_mask(batch, statistic, **bounds):
    return rejection_mask(*policies(batch), statistic=statistic, **bounds)[0]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_equal_verl(level, bound):
    threshold, options = BOUNDS[bound]
    for seed in range(3):
        batch = verl.batch(seed=seed, spread=0.25)
        for word in ("old_log_prob", "rollout_log_prob"):
            batch[word].requires_grad_()
        expected = their_weights(batch, level, threshold)
        found, _ = importance_weights(*policies(batch), level=LEVELS[level], **options)
        assert 0 < (expected == (1.3 if bound == "truncate" else 0)).sum() < expected.numel()
        assert_equal(found, expected)
        assert not found.requires_grad and not expected.requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_weights_beyond_the_exp_clamp_equal_verl(level):
    """Both bound a detached exponent to +-20, after summing."""
    batch = verl.engine_row([30.0, -45.0] if level == "sequence" else [30.0, -30.0])
    expected = their_weights(batch, level, 1e12)
    assert expected.min() >= math.exp(-20) * 0.99
    found, _ = importance_weights(*policies(batch), level=LEVELS[level], high=1e12)
    assert_equal(found / expected, torch.ones(1, 2))


@pytest.mark.parametrize("level", LEVELS)
def test_normalised_weights_equal_verl_while_they_stay_under_the_cap(level):
    """Weights that the bound zeroed count in the mean of both, a fully masked row in neither."""
    batch = verl.batch(spread=0.1)
    expected = their_weights(batch, level, "0.9_2.0", rollout_is_batch_normalize=True)
    assert expected.max() < 2.0 and (expected[batch["response_mask"] == 1] == 0).any()
    options = {"level": LEVELS[level], "bound": "mask", "low": 0.9, "high": 2.0, "normalize": True}
    assert_equal(importance_weights(*policies(batch), **options)[0], expected)


@pytest.mark.parametrize("level", LEVELS)
def test_normalised_weights_exceed_the_cap_in_verl_and_never_in_ours(level):
    """Dividing by a mean below 1 lifts what was truncated over the cap again; ours truncates once more."""
    batch = verl.batch()
    expected = their_weights(batch, level, 1.1, rollout_is_batch_normalize=True)
    assert expected.max() > 1.11
    found, _ = importance_weights(*policies(batch), level=LEVELS[level], high=1.1, normalize=True)
    assert found.max() == 1.1
    assert_equal(found, expected.clamp(max=1.1))


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_are_all_zeroed_crash_verl_and_are_zero_in_ours(level):
    """verl's effective sample size divides by 0: a bad batch, or a short micro-batch, ends the run."""
    batch = verl.engine_row([1.0, 1.0])
    with pytest.raises(ZeroDivisionError):
        their_weights(batch, level, "0.5_2.0")
    found, metrics = importance_weights(*policies(batch), level=LEVELS[level], bound="mask", low=0.5, normalize=True)
    assert (found == 0).all() and metrics["outside/mean"] == 1


def test_a_ratio_on_the_bound_is_rounded_out_by_verl_and_kept_by_ours():
    """Bounds are inclusive in both. verl compares after exp, so that log-probs of some nats miss by an ulp."""
    distance = math.log(5.0)
    old = next(x for x in (-k / 7 for k in range(1, 200)) if math.exp(x - (x - distance)) > 5.0)
    batch = {
        "old_log_prob": torch.tensor([[old, -1.0]], dtype=torch.float64),
        "rollout_log_prob": torch.tensor([[old - distance, -1.0]], dtype=torch.float64),
        "response_mask": torch.ones(1, 2, dtype=torch.long),
    }
    assert their_weights(batch, "token", "0.5_5.0").tolist() == [[0.0, 1.0]]
    assert importance_weights(*policies(batch), bound="mask", low=0.5, high=5.0)[0].tolist() == [[5.0, 1.0]]


def test_nan_under_the_mask_becomes_a_weight_of_nan_in_verl_and_of_0_in_ours():
    """R05: verl multiplies the weights by the mask."""
    clean = verl.batch()
    masked = clean["response_mask"] == 0
    batch = verl.spoilt(clean, masked)
    assert torch.equal(their_weights(batch, "token", 1.3).isnan(), masked)
    assert_equal(importance_weights(*policies(batch), high=1.3)[0], their_weights(clean, "token", 1.3))


def test_nan_on_a_live_token_spoils_verls_row_and_ours_drops_the_token():
    """The sequence weight and statistics of ours use the tokens that remain."""
    clean = verl.batch()
    cell = torch.zeros_like(clean["response_mask"], dtype=torch.bool)
    cell[2, 3] = True
    batch, without = verl.spoilt(clean, cell), clean | {"response_mask": clean["response_mask"] * ~cell}
    assert their_weights(batch, "token", 1.3)[cell].isnan()
    assert their_weights(batch, "sequence", 1.3)[2, :5].isnan().all()
    for level, ours in LEVELS.items():
        found, metrics = importance_weights(*policies(batch), level=ours, high=1.3)
        assert_equal(found, their_weights(without, level, 1.3))
        assert metrics["nonfinite/count"] == 1
    assert not their_mask(batch, "seq_mean_k1", "0.01_100").any(dim=1)[2]
    assert torch.equal(
        our_mask(batch, "sequence_geometric", low=0.01, high=100.0), their_mask(without, "seq_mean_k1", "0.01_100")
    )


# verl's statistic, its threshold, and ours by the same meaning. Bounds of a k1 hold for rollout/old in verl.
REJECTIONS = {
    "token_k1": ("0.8_1.6", "token_ratio", {"low": 1 / 1.6, "high": 1 / 0.8}),
    "token_k1-symmetric": ("1.25", "token_ratio", {"low": 0.8, "high": 1.25}),
    "token_k2": ("0.08", "token_ratio", {"low": math.exp(-0.4), "high": math.exp(0.4)}),
    "seq_sum_k1": ("0.7_1.9", "sequence_product", {"low": 1 / 1.9, "high": 1 / 0.7}),
    "seq_mean_k1": ("0.85_1.1", "sequence_geometric", {"low": 1 / 1.1, "high": 1 / 0.85}),
    "seq_max_k2": ("0.2", "sequence_max_k2", {"high": 0.2}),
    "seq_mean_k3": ("0.15", "sequence_mean_k3", {"high": 0.15}),
}
# Reachable by none of our statistics, since no paper of ours uses them; token_k3 is token_ratio between two bounds.
ABSENT = {"token_k3", "seq_sum_k2", "seq_sum_k3", "seq_mean_k2", "seq_max_k3"}


def test_every_statistic_of_verl_is_matched_here_or_named_as_absent():
    ours = {name.partition("-")[0] for name in REJECTIONS}
    assert ours | ABSENT == verl.load("rollout_corr_helper").SUPPORTED_ROLLOUT_RS_OPTIONS
    assert not ours & ABSENT


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection_equals_verl(name):
    threshold, statistic, bounds = REJECTIONS[name]
    kept = dropped = 0
    for seed in range(8):
        batch = verl.batch(seed=seed, rows=8)
        expected = their_mask(batch, name.partition("-")[0], threshold)
        assert torch.equal(our_mask(batch, statistic, **bounds), expected)
        kept, dropped = kept + expected.sum(), dropped + (batch["response_mask"].bool() & ~expected).sum()
    assert kept > 20 and dropped > 20


def test_two_rejections_of_verl_are_the_product_of_ours():
    batch = verl.batch(seed=1)
    expected = their_mask(batch, "token_k1,seq_max_k2", "0.8_1.6,0.5")
    found = our_mask(batch, "token_ratio", low=1 / 1.6, high=1 / 0.8) & our_mask(batch, "sequence_max_k2", high=0.5)
    assert torch.equal(found, expected) and expected.any()


@pytest.mark.parametrize("name", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_r01_bounds_of_a_k1_hold_for_rollout_over_old_in_verl_and_for_old_over_rollout_in_ours(name):
    """R01: verl compares -log(old/rollout) with the logs of the bounds, so that asymmetric ones are inverted.

    By verl's own IcePop, with the same string, the other tokens stay.
    """
    ratios = torch.tensor([0.3, 0.6, 1.0, 1.8, 3.0, 4.5], dtype=torch.float64)
    distance = ratios.log().unsqueeze(0 if name == "token_k1" else 1)
    batch = verl.engine_row([0.0]) | {
        "old_log_prob": distance,
        "rollout_log_prob": torch.zeros_like(distance),
        "response_mask": torch.ones_like(distance, dtype=torch.long),
    }
    assert their_mask(batch, name, "0.5_5.0").flatten().int().tolist() == [1, 1, 1, 1, 0, 0]
    found = our_mask(batch, REJECTIONS[name][1], low=0.5, high=5.0)
    assert found.flatten().int().tolist() == [0, 1, 1, 1, 1, 1]
    icepop = their_weights(batch, "token" if name == "token_k1" else "sequence", "0.5_5.0")
    assert torch.equal(found, icepop > 0)


@pytest.mark.parametrize("level", ["seq_sum_k1", "seq_mean_k1"])
def test_verl_clamps_each_token_of_a_rejection_statistic_and_ours_the_sum(level):
    """exp clamp: +30 and -28 nats are +2 together; token by token they become +20 and -20, which hides them."""
    batch = verl.engine_row([30.0, -28.0])
    assert their_mask(batch, level, "0.5_2.0").all()
    assert not our_mask(batch, REJECTIONS[level][1], low=0.5, high=2.0).any()
    # For its weights verl sums first, too.
    assert_equal(their_weights(batch, "sequence", 1e12), torch.full((1, 2), math.exp(2), dtype=torch.float64))


def test_the_divergence_of_a_far_token_is_capped_in_verl_and_goes_on_in_ours():
    """exp clamp: in verl no k2 exceeds 200, however far the token is."""
    batch = verl.engine_row([-30.0])
    assert their_mask(batch, "seq_max_k2", "300").all()
    assert not our_mask(batch, "sequence_max_k2", high=300.0).any()
    assert our_mask(batch, "sequence_max_k2", high=450.0).all()


def test_an_empty_batch_raises_in_verl_and_is_empty_in_ours():
    """R04: the helper raises ValueError, its metrics AssertionError."""
    batch = verl.batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    with pytest.raises(ValueError, match="at least one valid token"):
        verl.correction(batch, rollout_is="token")
    with pytest.raises(AssertionError):
        verl.load("rollout_corr_helper").compute_offpolicy_metrics(*policies(batch))
    assert (importance_weights(*policies(batch))[0] == 0).all()
    assert not our_mask(batch, "token_ratio", low=0.5).any()


def test_mismatch_metrics_equal_verl_but_for_fully_masked_rows():
    """verl's mean over rows takes a fully masked row for one with ratio 1; ours leaves it out."""
    batch = verl.batch()
    names = {"kl": "k1/mean", "k3_kl": "k3/mean", "chi2_token": "chi2_token/mean"}
    metrics = verl.load("rollout_corr_helper").compute_offpolicy_metrics
    expected, found = metrics(*policies(batch)), mismatch_metrics(*policies(batch))
    for theirs, ours in names.items():
        assert found[ours].item() == pytest.approx(expected[theirs], abs=1e-7)
    live = {name: value[batch["response_mask"].any(dim=1)] for name, value in batch.items()}
    chi2 = metrics(*policies(live))["chi2_seq"]
    assert found["chi2_sequence/mean"].item() == pytest.approx(chi2, abs=1e-9)
    assert expected["chi2_seq"] == pytest.approx(chi2 * 5 / 6, abs=1e-9)


def test_effective_sample_size_equals_verl():
    batch = verl.batch()
    weights, _, metrics = verl.correction(batch, rollout_is="token", rollout_is_threshold=1.3)
    found = effective_sample_size(weights, batch["response_mask"])
    assert found.item() == pytest.approx(metrics["rollout_corr/rollout_is_eff_sample_size"], abs=1e-7)
