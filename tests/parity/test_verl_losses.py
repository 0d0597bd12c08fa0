"""Our surrogates against verl's policy losses, value and gradient, in float64; and where ours differs on purpose."""

import math

import pytest
import torch

from tests.parity import verl_reference as verl
from tests.parity.verl_reference import assert_equal, value_and_gradient
from trimtab.aggregation import MODES, aggregate
from trimtab.policy_loss import cispo, gspo, gspo_token, ppo_clip, sapo

pytestmark = pytest.mark.slow  # importing verl takes ten seconds

NO_DUAL_CLIP = 1e30
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
OUR_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
PAPER_CLIP = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
SAPO = {"tau_positive": 1.0, "tau_negative": 1.05}

# What verl is asked for, and ours by the same meaning.
PAIRS = {
    "ppo_clip": (("vanilla", CLIP | {"clip_ratio_c": NO_DUAL_CLIP}), (ppo_clip, OUR_CLIP)),
    "dual_clip": (("vanilla", CLIP | {"clip_ratio_c": 1.5}), (ppo_clip, OUR_CLIP | {"dual_clip": 1.5})),
    "gspo": (("gspo", PAPER_CLIP), (gspo_token, {})),
    "gspo-wide": (("gspo", CLIP), (gspo_token, OUR_CLIP)),
    "cispo": (("cispo", CLIP), (cispo, {"cap": 1.28, "floor": 0.8})),
    "cispo-no-floor": (("cispo", {"clip_ratio_low": 10.0, "clip_ratio_high": 0.28}), (cispo, {"cap": 1.28})),
}


@pytest.fixture(autouse=True, scope="module")
def needs_verl():
    verl.load("core_algos")


def theirs(name, *, mode, **options):
    return lambda batch: verl.policy_loss(name, batch, mode=mode, **options)[0]


def ours(core, *, mode, **options):
    def loss(batch):
        words = [batch[word] for word in ("log_prob", "old_log_prob", "advantages", "response_mask")]
        max_length = words[0].shape[1] if mode == "seq-mean-token-sum-norm" else None
        return aggregate(core(*words, **options)[0], batch["response_mask"], mode=mode, max_length=max_length)

    return loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAIRS)
def test_equals_verl(name, mode):
    (their_name, their_options), (core, our_options) = PAIRS[name]
    for seed in range(3):
        batch = verl.batch(seed=seed)
        expected = value_and_gradient(theirs(their_name, mode=mode, **their_options), batch)
        assert expected[1].abs().max() > 1e-3
        assert_equal(value_and_gradient(ours(core, mode=mode, **our_options), batch), expected)


@pytest.mark.parametrize("taus", [(1.0, 1.05), (0.7, 2.3)])
def test_sapo_equals_verl(taus):
    expected = value_and_gradient(
        theirs("sapo", mode="seq-mean-token-mean", tau_pos=taus[0], tau_neg=taus[1]), verl.batch()
    )
    assert expected[1].abs().max() > 1e-3
    options = {"tau_positive": taus[0], "tau_negative": taus[1]}
    assert_equal(value_and_gradient(ours(sapo, mode="seq-mean-token-mean", **options), verl.batch()), expected)


@pytest.mark.parametrize("clip", [(3e-4, 4e-4), (0.2, 0.28)])
def test_gspo_by_rows_equals_verls_token_form_where_a_row_has_one_advantage(clip):
    batch = verl.batch()
    batch["advantages"] = batch["advantages"][:, :1].expand_as(batch["log_prob"])
    their_clip = {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    expected = value_and_gradient(theirs("gspo", mode="seq-mean-token-mean", **their_clip), batch)
    assert expected[1].abs().max() > 1e-3
    our_clip = {"clip_low": clip[0], "clip_high": clip[1]}
    assert_equal(value_and_gradient(ours(gspo, mode="seq-mean-token-mean", **our_clip), batch), expected)


@pytest.mark.parametrize("name", PAIRS)
def test_clip_shares_equal_verl(name):
    (their_name, their_options), (core, our_options) = PAIRS[name]
    batch = verl.batch()
    _, expected = verl.policy_loss(their_name, batch, **their_options)
    _, found = core(*(batch[w] for w in ("log_prob", "old_log_prob", "advantages", "response_mask")), **our_options)
    assert expected["actor/pg_clipfrac"] > 0
    # verl takes the mean of float32 flags, with 1e-8 in the count.
    assert found["clip/mean"].item() == pytest.approx(expected["actor/pg_clipfrac"], abs=1e-6)
    if "dual_clip/mean" in found:
        assert found["dual_clip/mean"].item() == pytest.approx(expected["actor/pg_clipfrac_lower"], abs=1e-6) != 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
def test_other_masks_of_verl_equal_too(dtype):
    batch = verl.batch()
    expected = value_and_gradient(theirs("vanilla", mode="token-mean", **CLIP, clip_ratio_c=3.0), batch)
    batch["response_mask"] = batch["response_mask"].to(dtype)
    found = value_and_gradient(ours(ppo_clip, mode="token-mean", **OUR_CLIP, dual_clip=3.0), batch)
    assert_equal(found, expected)


SPOILT = {
    "vanilla": (CLIP | {"clip_ratio_c": 3.0}, ppo_clip, OUR_CLIP | {"dual_clip": 3.0}),
    "gspo": (CLIP, gspo_token, OUR_CLIP),
    "cispo": (CLIP, cispo, {"cap": 1.28, "floor": 0.8}),
    "sapo": ({}, sapo, SAPO),
}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", SPOILT)
def test_nan_under_the_mask_spoils_verls_losses_and_not_ours(name, mode):
    """R05: verl selects after the arithmetic, or multiplies by the mask, and 0 * NaN is NaN; ours selects before.

    In verl only token-mean hides a masked NaN from the loss. CISPO's gradient is NaN at the masked cell; GSPO's is 0
    on every cell of a row that has one; the clamp of vanilla and SAPO keeps it out of the gradient.
    """
    their_options, core, our_options = SPOILT[name]
    clean = verl.batch()
    masked = clean["response_mask"] == 0
    expected = value_and_gradient(theirs(name, mode=mode, **their_options), clean)
    batch = verl.spoilt(clean, masked)
    value, gradient = value_and_gradient(theirs(name, mode=mode, **their_options), batch)
    by_rows = name == "sapo" or mode == "seq-mean-token-mean"
    assert value.isnan() == (by_rows or name == "gspo")
    if name == "cispo":
        assert torch.equal(gradient.isnan(), masked)
    else:
        spoilt_rows = masked.any(dim=1, keepdim=True) if name == "gspo" else torch.zeros_like(masked)
        assert_equal(gradient, torch.where(spoilt_rows, 0.0, expected[1]))
    found = value_and_gradient(ours(core, mode="seq-mean-token-mean" if name == "sapo" else mode, **our_options), batch)
    assert_equal(found, expected)


@pytest.mark.parametrize("name", SPOILT)
def test_nan_on_a_live_token_poisons_verls_loss_and_ours_drops_the_token(name):
    """A non-finite live token is removed and counted; the denominator keeps it."""
    their_options, core, our_options = SPOILT[name]
    mode = "seq-mean-token-mean" if name == "sapo" else "token-mean"
    clean = verl.batch()
    cell = torch.zeros_like(clean["response_mask"], dtype=torch.bool)
    cell[2, 3] = True
    batch = verl.spoilt(clean, cell, words=("log_prob",))
    assert theirs(name, mode=mode, **their_options)(batch).isnan()
    value, gradient = value_and_gradient(ours(core, mode=mode, **our_options), batch)
    assert value.isfinite() and gradient.isfinite().all() and gradient[cell] == 0
    if name in ("vanilla", "cispo"):
        without = verl.policy_loss(name, clean, mask=clean["response_mask"] * ~cell, **their_options)[0]
        live = clean["response_mask"].sum()
        assert_equal(value, without * (live - 1) / live)


@pytest.mark.parametrize("log_ratio", [25.0, 100.0])
def test_ppo_beyond_the_exp_clamp_verl_loses_its_gradient_and_ours_pulls_back(log_ratio):
    """exp clamp: beyond +20 nats verl's ratio is constant; ours goes on as the tangent, e^20 per nat."""
    batch = verl.row([log_ratio], -2.0)
    value, gradient = value_and_gradient(theirs("vanilla", mode="token-mean", clip_ratio_c=NO_DUAL_CLIP), batch)
    assert_equal(value / math.exp(20), torch.tensor(2.0))
    assert gradient == 0
    value, gradient = value_and_gradient(ours(ppo_clip, mode="token-mean"), batch)
    assert_equal(value / math.exp(20), torch.tensor(2 * (1 + log_ratio - 20)))
    assert_equal(gradient / math.exp(20), torch.tensor([[2.0]]))


def test_below_the_exp_clamp_verl_loses_a_gradient_of_2e_9_and_ours_keeps_it():
    """exp clamp from below: verl's ratio never falls under e^-20; ours goes on falling."""
    batch = verl.row([-21.0], 2.0)
    value, gradient = value_and_gradient(theirs("vanilla", mode="token-mean"), batch)
    assert (value / math.exp(-20)).item() == pytest.approx(-2.0) and gradient == 0
    value, gradient = value_and_gradient(ours(ppo_clip, mode="token-mean"), batch)
    assert (value / math.exp(-21)).item() == pytest.approx(-2.0)
    assert (gradient / math.exp(-21)).item() == pytest.approx(-2.0)


@pytest.mark.parametrize("core", [gspo, gspo_token])
def test_gspo_beyond_a_log_ratio_of_10_verl_loses_its_gradient_and_ours_pulls_back(core):
    """verl clamps the row's log ratio at 10, we take the tangent at 20: at 12 ours is still the exact e^12."""
    batch = verl.row([11.0, 13.0], -1.0)
    value, gradient = value_and_gradient(theirs("gspo", mode="seq-mean-token-mean", **CLIP), batch)
    assert (value / math.exp(10)).item() == pytest.approx(1.0) and (gradient == 0).all()
    value, gradient = value_and_gradient(ours(core, mode="seq-mean-token-mean", **OUR_CLIP), batch)
    assert (value / math.exp(12)).item() == pytest.approx(1.0)
    assert_equal(gradient / math.exp(12), torch.tensor([[0.5, 0.5]]))


@pytest.mark.parametrize(("core", "slope"), [(gspo, 1.0), (gspo_token, 6.0)])
def test_gspo_beyond_20_ours_is_the_tangent_where_verl_stays_at_e_10(core, slope):
    """At 25: 6 e^20. The gradient is the tangent's by rows, and s itself by tokens, where s is detached."""
    batch = verl.row([24.0, 26.0], -1.0)
    value, gradient = value_and_gradient(theirs("gspo", mode="seq-mean-token-mean", **CLIP), batch)
    assert (value / math.exp(10)).item() == pytest.approx(1.0) and (gradient == 0).all()
    value, gradient = value_and_gradient(ours(core, mode="seq-mean-token-mean", **OUR_CLIP), batch)
    assert (value / math.exp(20)).item() == pytest.approx(6.0)
    assert_equal(gradient / math.exp(20), torch.full((1, 2), slope / 2))


def test_by_default_verl_clips_dually_at_3_and_ours_does_not():
    """PPO has no dual clip; verl's clip_ratio_c is 3.0 unless it is set."""
    batch = verl.row([math.log(5.0)], -1.0)
    value, gradient = value_and_gradient(theirs("vanilla", mode="token-mean"), batch)
    assert value.item() == pytest.approx(3.0) and gradient == 0
    value, gradient = value_and_gradient(ours(ppo_clip, mode="token-mean"), batch)
    assert value.item() == pytest.approx(5.0) and gradient.item() == pytest.approx(5.0)


def test_by_default_verl_clips_gspo_at_20_percent_and_ours_at_the_papers_bounds():
    """GSPO's paper has 3e-4 and 4e-4; verl falls back to clip_ratio."""
    batch = verl.row([0.1, 0.1], 1.0)
    assert theirs("gspo", mode="seq-mean-token-mean")(batch).item() == pytest.approx(-math.exp(0.1))
    assert ours(gspo_token, mode="seq-mean-token-mean")(batch).item() == pytest.approx(-1.0004)


def test_by_default_verl_floors_cispo_at_80_percent_and_ours_has_no_floor():
    """MiniMax-M1 has no lower bound in effect."""
    batch = verl.row([math.log(0.1)], 1.0)
    log_prob = batch["log_prob"].item()
    assert theirs("cispo", mode="token-mean")(batch).item() == pytest.approx(-0.8 * log_prob)
    assert ours(cispo, mode="token-mean", cap=1.2)(batch).item() == pytest.approx(-0.1 * log_prob)


def test_verls_sapo_takes_the_mean_over_rows_whatever_the_mode_and_ours_takes_the_mode():
    """A mode that is set and ignored is a silent no-op."""
    batch = verl.batch()
    by_row = theirs("sapo", mode="seq-mean-token-mean")(batch)
    assert theirs("sapo", mode="token-mean")(batch) == by_row
    assert_equal(ours(sapo, mode="seq-mean-token-mean")(batch), by_row)
    assert (ours(sapo, mode="token-mean")(batch) - by_row).abs() > 1e-2
