"""A whole corrected loss of verl, and its KL terms, against ours; and where ours differs on purpose."""

import math
from itertools import product

import pytest
import torch

from tests.parity import verl_reference as verl
from tests.parity.verl_reference import assert_equal, value_and_gradient
from trimtab.aggregation import aggregate
from trimtab.kl import kl_penalty
from trimtab.objective import Objective

pytestmark = pytest.mark.slow  # importing verl takes ten seconds

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
SURROGATE = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
WEIGHT = {"name": "importance", "level": "token", "high": 1.3}
ICEPOP = {"name": "importance", "level": "token", "bound": "mask", "low": 0.6, "high": 1.4}
# The bounds of verl's k1 hold for rollout/old.
BY_TOKEN = ("0.7_1.4", {"name": "rejection", "statistic": "token_ratio", "low": 1 / 1.4, "high": 1 / 0.7})
BY_ROW = ("0.9_1.2", {"name": "rejection", "statistic": "sequence_geometric", "low": 1 / 1.2, "high": 1 / 0.9})
REJECTIONS = {"token_k1": BY_TOKEN, "seq_mean_k1": BY_ROW}
CASES = list(product(REJECTIONS, ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"]))


@pytest.fixture(autouse=True, scope="module")
def needs_verl():
    verl.load("core_algos")


def corrected(statistic, mode, *, step_wide):
    """verl's loss after rejection; its V1 trainer passes the step's counts from before it, its V0 trainer none."""

    def loss(batch):
        weights, kept, _ = verl.correction(
            batch,
            rollout_is="token",
            rollout_is_threshold=1.3,
            rollout_rs=statistic,
            rollout_rs_threshold=REJECTIONS[statistic][0],
        )
        assert 0 < kept.sum() < batch["response_mask"].sum()
        mask = batch["response_mask"]
        before = {"batch_num_tokens": mask.sum(), "global_batch_size": mask.any(dim=1).sum()}
        info = before if step_wide else {}
        return verl.policy_loss("vanilla", batch, mode=mode, weights=weights, mask=kept, info=info, **CLIP)[0]

    return loss


def ours(mode, denominator, *, weights=(WEIGHT,), masks=()):
    aggregation = {"mode": mode, "denominator": denominator}
    objective = Objective(surrogate=SURROGATE, weights=weights, masks=masks, aggregation=aggregation)
    return lambda batch: objective(batch)[0]


@pytest.mark.parametrize(("statistic", "mode"), CASES)
def test_kept_denominators_are_those_of_verl_without_step_wide_counts(statistic, mode):
    expected = value_and_gradient(corrected(statistic, mode, step_wide=False), verl.batch())
    assert expected[1].abs().max() > 1e-3
    assert_equal(value_and_gradient(ours(mode, "kept", masks=[REJECTIONS[statistic][1]]), verl.batch()), expected)


# The one case left out differs on purpose, and has its own test.
@pytest.mark.parametrize(("statistic", "mode"), [c for c in CASES if c != ("token_k1", "seq-mean-token-mean")])
def test_original_denominators_are_those_of_verls_step(statistic, mode):
    expected = value_and_gradient(corrected(statistic, mode, step_wide=True), verl.batch())
    assert expected[1].abs().max() > 1e-3
    assert_equal(value_and_gradient(ours(mode, "original", masks=[REJECTIONS[statistic][1]]), verl.batch()), expected)


def test_after_dropping_tokens_verls_step_divides_a_row_by_what_is_kept_and_ours_by_its_length():
    """Two denominators in one loss: verl counts the rows before the rejection, their tokens after it."""
    mode, (threshold, mask) = "seq-mean-token-mean", BY_TOKEN
    batch = verl.batch()
    theirs = corrected("token_k1", mode, step_wide=True)(batch)
    kept = verl.correction(batch, rollout_rs="token_k1", rollout_rs_threshold=threshold)[1]
    original, by_kept = (ours(mode, which, masks=[mask])(batch) for which in ("original", "kept"))
    assert_equal(theirs, by_kept * kept.any(dim=1).sum() / batch["response_mask"].any(dim=1).sum())
    assert (original - theirs).abs() > 1e-3
    # Ours by hand: the loss of the kept tokens over the lengths that the rows had.
    weights = verl.correction(batch, rollout_is="token", rollout_is_threshold=1.3)[0]
    rows = [
        verl.policy_loss("vanilla", {n: v[i : i + 1] for n, v in batch.items()}, mode="token-sum", mask=kept[i : i + 1],
                         weights=weights[i : i + 1], **CLIP)[0] / count
        for i, count in enumerate(batch["response_mask"].sum(dim=1))
        if count
    ]  # fmt: skip
    assert_equal(original, sum(rows) / len(rows))


def test_icepop_counts_its_zeroed_tokens_in_verl_and_as_asked_in_ours():
    """verl's IcePop leaves the mask alone: the denominator is the original one. Ours has both."""
    batch = verl.batch()
    weights, kept, _ = verl.correction(batch, rollout_is="token", rollout_is_threshold="0.6_1.4")
    assert torch.equal(kept, batch["response_mask"]) and (weights[kept == 1] == 0).any()

    def theirs(batch):
        return verl.policy_loss("vanilla", batch, weights=weights, **CLIP)[0]

    expected = value_and_gradient(theirs, batch)
    assert_equal(value_and_gradient(ours("token-mean", "original", weights=[ICEPOP]), batch), expected)
    by_kept = ours("token-mean", "kept", weights=[ICEPOP])(batch)
    assert_equal(by_kept, expected[0] * kept.sum() / (weights > 0).sum())


ESTIMATORS = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}


def their_kl(name):
    return lambda batch: token_mean(
        verl.load("core_algos").kl_penalty(batch["log_prob"], batch["ref_log_prob"], name), batch
    )


def our_kl(name, **options):
    def loss(batch):
        words = (batch["log_prob"], batch["ref_log_prob"], batch["response_mask"])
        return token_mean(kl_penalty(*words, estimator=name, **options), batch)

    return loss


def token_mean(values, batch):
    return aggregate(values, batch["response_mask"], mode="token-mean")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_equals_verl(name):
    expected = value_and_gradient(their_kl(name), verl.batch())
    assert expected[1].abs().max() > 1e-3
    assert_equal(value_and_gradient(our_kl(ESTIMATORS[name]), verl.batch()), expected)


def test_verls_straight_through_k3_is_our_unbiased_one_on_policy():
    """With k3+ verl takes the gradient of k2, which is the KL's where current and old policy agree."""
    batch = verl.batch()
    expected = value_and_gradient(their_kl("k3+"), batch)
    assert_equal(value_and_gradient(our_kl("unbiased", old_log_prob=batch["log_prob"]), batch), expected)
    # Away from it ours has the update ratio, and verl's has none.
    found = value_and_gradient(our_kl("unbiased", old_log_prob=batch["old_log_prob"]), batch)
    live = batch["response_mask"].bool()
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
    assert_equal(found[1][live], (expected[1] * ratio)[live])
    assert (ratio[live] - 1).abs().max() > 0.5


@pytest.mark.parametrize("distance", [3.0, 9.0, 25.0])
def test_k3_beyond_10_loses_its_gradient_in_verl_and_keeps_it_in_ours(distance):
    """verl clamps the value to +-10: where the policy has drifted the furthest, nothing pulls it back.

    Ours is e^d - 1 - d, and its tangent beyond d = 20.
    """
    batch = verl.row([0.0], 0.0)
    batch["ref_log_prob"] = batch["log_prob"] + distance
    theirs, gradient = value_and_gradient(their_kl("k3"), batch)
    assert theirs == 10 and gradient == 0
    slope = math.exp(min(distance, 20.0))
    found, gradient = value_and_gradient(our_kl("k3"), batch)
    assert found.item() == pytest.approx(slope * (1 + max(distance - 20, 0)) - 1 - distance, rel=1e-12)
    assert gradient.item() == pytest.approx(1 - slope, rel=1e-12)
