"""The composed loss: by hand, the same however a step is split, what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.batches import assert_near, ragged_batch
from trimtab.aggregation import MODES
from trimtab.metrics import combine
from trimtab.objective import MASKS, PENALTIES, SURROGATES, WEIGHTS, Objective, Place, Term
from trimtab.policy_loss import ppo_clip
from trimtab.recipe import load_recipe
from trimtab.tensors import bool_mask

LOG2 = math.log(2)
CLIP = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}
ICEPOP = {"name": "importance", "level": "token", "bound": "mask", "low": 0.5, "high": 5.0}
KL = {"name": "kl", "estimator": "k3", "coefficient": 0.1}
TOKEN_MEAN = {"mode": "token-mean"}


def golden_batch():
    """Row 0 has three live tokens, row 1 one, with garbage after them."""
    nan = math.nan
    update = torch.tensor([[1.25, 1.5, 0.75], [0.75, nan, 1.0]], dtype=torch.float64).log()  # current / old
    engine = torch.tensor([[0.49, 1.5, 3.0], [2.0, 1.0, nan]], dtype=torch.float64).log()  # old / rollout
    to_ref = torch.tensor([[2.0, 1.0, 1.0], [0.5, nan, nan]], dtype=torch.float64).log()  # reference / current
    old = torch.full((2, 3), -1.5, dtype=torch.float64)
    return {
        "log_prob": (old + update).requires_grad_(),
        "old_log_prob": old,
        "rollout_log_prob": old - engine,
        "ref_log_prob": old + update + to_ref,
        "advantages": torch.tensor([2.0, -1.0], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    }


# Surrogate: -2.5, -2.56 (clipped at 1.28), -1.5 | 0.8 (clipped at 0.8). Weight: 0, 1.5, 3 | 2.
# Product: 0, -3.84, -4.5 | 1.6, the first token dropped. Sum -6.74, row sums -8.34 and 1.6.
# k3: 1 - log 2, 0, 0 | log 2 - 1/2; sum 1/2. The penalty keeps the original denominator.
PENALTY_ROWS = 0.1 * ((1 - LOG2) / 3 + (LOG2 - 0.5)) / 2
GOLDEN = [
    ("token-mean", "original", -6.74 / 4 + 0.1 * 0.5 / 4),
    ("token-mean", "kept", -6.74 / 3 + 0.1 * 0.5 / 4),
    ("token-sum", "original", -6.74 + 0.1 * 0.5),
    ("token-sum", "kept", -6.74 + 0.1 * 0.5),
    ("seq-mean-token-mean", "original", (-8.34 / 3 + 1.6) / 2 + PENALTY_ROWS),
    ("seq-mean-token-mean", "kept", (-8.34 / 2 + 1.6) / 2 + PENALTY_ROWS),
    ("seq-mean-token-sum", "original", -6.74 / 2 + 0.1 * 0.5 / 2),
    ("seq-mean-token-sum", "kept", -6.74 / 2 + 0.1 * 0.5 / 2),
    ("seq-mean-token-sum-norm", "original", -6.74 / 2 / 10 + 0.1 * 0.5 / 2 / 10),
    ("seq-mean-token-sum-norm", "kept", -6.74 / 2 / 10 + 0.1 * 0.5 / 2 / 10),
]


@pytest.mark.parametrize(("mode", "denominator", "expected"), GOLDEN)
def test_golden_loss(mode, denominator, expected):
    objective = Objective(
        surrogate=CLIP,
        weights=[ICEPOP],
        penalties=[KL],
        aggregation={"mode": mode, "denominator": denominator, "max_length": 10},
    )
    loss, _ = objective(golden_batch())
    assert loss.dim() == 0
    assert_near(loss.detach(), expected, rtol=1e-9)


def test_golden_gradient():
    # Token-mean over 4: surrogate -r A w where it is neither clipped nor dropped, so -0.75 * 2 * 3 = -4.5 at one
    # token; penalty 0.1 (1 - ref/current), so -0.1 and 0.05.
    batch = golden_batch()
    objective = Objective(surrogate=CLIP, weights=[ICEPOP], penalties=[KL], aggregation=TOKEN_MEAN)
    objective(batch)[0].backward()
    assert_near(batch["log_prob"].grad, [[-0.1 / 4, 0.0, -4.5 / 4], [0.05 / 4, 0.0, 0.0]], rtol=1e-9)


def test_golden_metrics():
    objective = Objective(surrogate=CLIP, weights=[ICEPOP], penalties=[KL], aggregation=TOKEN_MEAN)
    _, metrics = objective(golden_batch())
    expected = {
        "surrogate/clip_high/mean": 1 / 4,
        "surrogate/clip_low/mean": 1 / 4,
        "weights/importance/outside/mean": 1 / 4,
        "weights/importance/weight/mean": 6.5 / 4,
        "weights/importance/ratio/mean": 6.99 / 4,
        "penalties/kl/mean": 0.5 / 4,
        # k3 of current / old: r - 1 - log r over the four tokens.
        "kl/mean": (1.25 + 1.5 + 0.75 + 0.75 - 4 - math.log(1.25 * 1.5 * 0.75 * 0.75)) / 4,
        "ess/mean": 6.5**2 / (4 * (1.5**2 + 3**2 + 2**2)),
        "tokens/count": 4,
        "nonfinite/count": 0,
    }
    for key, value in expected.items():
        assert_near(metrics[key], value, rtol=1e-6)
    for key, metric in metrics.items():
        name, _, kind = key.rpartition("/")
        assert kind in ("mean", "sum", "max", "min", "count")
        assert kind in ("sum", "count") or f"{name}/count" in metrics
        assert metric.dim() == 0 and not metric.requires_grad


def test_golden_totals():
    objective = Objective(surrogate=CLIP, weights=[ICEPOP], aggregation=TOKEN_MEAN)
    batch = golden_batch()
    known = {word: batch[word] for word in ("response_mask", "old_log_prob", "rollout_log_prob")}  # before the step
    totals = objective.totals(known)
    expected = {
        "tokens": 4,
        "sequences": 2,
        "kept_tokens": 3,
        "kept_sequences": 2,
        "weight": 6.5,
        "weight_square": 15.25,
    }
    assert set(totals) == set(expected)
    for name, value in expected.items():
        assert totals[name].dtype == torch.float64 and totals[name].dim() == 0 and not totals[name].requires_grad
        assert_near(totals[name], value, rtol=1e-9)


def test_golden_normalized_weight():
    # TIS with a cap of 2: 0.49, 1.5, 2 | 2, mean 5.99 / 4; 2 over it is under the cap. Weighted surrogate
    # -2.5 * 0.49 - 2.56 * 1.5 - 1.5 * 2 + 0.8 * 2 = -6.465.
    tis = {"name": "importance", "high": 2.0, "normalize": True}
    loss, metrics = Objective(surrogate=CLIP, weights=[tis], aggregation=TOKEN_MEAN)(golden_batch())
    assert_near(loss.detach(), -6.465 / (5.99 / 4) / 4, rtol=1e-9)
    assert_near(metrics["weights/importance/weight/mean"], 1.0)


@pytest.mark.parametrize("level", ["token", "sequence_product"])
def test_the_engine_weight_does_not_depend_on_the_surrogate(level):
    # A weight's level is its own: https://github.com/NVIDIA-NeMo/RL/pull/2269.
    weight = {"name": "importance", "level": level, "high": None}
    _, metrics = Objective(surrogate=CLIP, weights=[weight], aggregation=TOKEN_MEAN)(golden_batch())
    expected = {"token": 6.99 / 4, "sequence_product": (3 * 0.49 * 1.5 * 3 + 2) / 4}
    assert_near(metrics["weights/importance/weight/mean"], expected[level])


def test_rejection_keeps_or_changes_the_denominator_as_stated():
    # https://github.com/verl-project/verl/pull/3915: log ratios .1, -1.5, .8, -10, .3 in a band of [0.5, 2]: exp(.8)
    # is 2.23, so that three of five go.
    engine = torch.tensor([[0.1, -1.5, 0.8, -10.0, 0.3]], dtype=torch.float64)
    zero = torch.zeros(1, 5, dtype=torch.float64)
    batch = {"log_prob": zero, "old_log_prob": zero, "rollout_log_prob": -engine, "advantages": -torch.ones(1)}
    batch["response_mask"] = torch.ones(1, 5)
    kept = math.exp(0.1) + math.exp(0.3)
    for denominator, count in (("original", 5), ("kept", 2)):
        objective = Objective(
            surrogate=CLIP,
            weights=[{**ICEPOP, "high": 2.0}],
            aggregation={"mode": "token-mean", "denominator": denominator},
        )
        assert_near(objective(batch)[0], kept / count, rtol=1e-9)


def test_a_removed_token_leaves_the_original_denominator():
    batch = golden_batch()
    batch["log_prob"].data[0, 2] = math.nan
    loss, metrics = Objective(surrogate=CLIP, aggregation=TOKEN_MEAN)(batch)
    loss.backward()
    assert_near(loss.detach(), (-2.5 - 2.56 + 0.8) / 4, rtol=1e-9)
    assert batch["log_prob"].grad.isfinite().all() and metrics["nonfinite/count"] == 1


WEIGHT_CHOICES = [
    [],
    [{"name": "importance", "high": 1.1}],
    [{**ICEPOP, "low": 0.8, "high": 1.2}],
    [{**ICEPOP, "low": 0.8, "high": 1.2, "normalize": True}],
    [{"name": "importance", "level": "sequence_product", "high": 1.3, "normalize": True}],
    [
        {
            "name": "importance",
            "level": "sequence_geometric",
            "bound": "mask",
            "low": 0.9,
            "high": 1.05,
            "normalize": True,
        }
    ],
    [{"name": "importance", "level": "prefix_min", "high": None, "normalize": True}],
]


def run_step(objective, batch, pieces):
    """Loss, gradient and metrics of a step in micro-batches: totals added up first, then the shares."""
    log_prob = batch["log_prob"].detach().clone().requires_grad_()
    batch = batch | {"log_prob": log_prob}
    micro = [{word: tensor[piece] for word, tensor in batch.items()} for piece in pieces]
    parts = [objective.totals(part) for part in micro]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    shares = [objective(part, totals) for part in micro]
    loss = sum(share for share, _ in shares)
    loss.backward()
    return loss.detach(), log_prob.grad, combine(metrics for _, metrics in shares)


def agree(actual, expected):
    torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(actual[2], expected[2], rtol=1e-6, atol=1e-7)  # shares of tokens are float32


@st.composite
def _steps(draw):
    rows, length = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, length), min_size=rows, max_size=rows))
    mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    batch = ragged_batch(dtype=torch.float64, seed=draw(st.integers(0, 999)), mask=mask)
    if draw(st.booleans()):  # a live or masked cell that is not finite
        word = draw(st.sampled_from(("log_prob", "old_log_prob", "rollout_log_prob")))
        batch[word][draw(st.integers(0, rows - 1)), draw(st.integers(0, length - 1))] = math.nan
    cuts = [0, *sorted(draw(st.lists(st.integers(0, rows), max_size=3))), rows]
    pieces = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    order = torch.tensor(draw(st.permutations(range(rows))))
    return batch, pieces, order


@settings(deadline=None, derandomize=True, max_examples=150)
@given(_steps(), st.sampled_from(WEIGHT_CHOICES), st.sampled_from(MODES), st.sampled_from(["original", "kept"]))
def test_no_split_order_or_padding_changes_loss_gradient_or_metrics(step, weights, mode, denominator):
    batch, pieces, order = step
    objective = Objective(
        surrogate={**CLIP, "dual_clip": 3.0},
        weights=weights,
        penalties=[KL, {"name": "kl", "estimator": "unbiased", "coefficient": 0.01}],
        aggregation={"mode": mode, "denominator": denominator, "max_length": 9},
    )
    whole = run_step(objective, batch, [slice(None)])
    assert whole[0].isfinite() and whole[1].isfinite().all()
    assert all(metric.isfinite() for metric in whole[2].values())
    agree(run_step(objective, batch, pieces), whole)
    log_prob = batch["log_prob"].detach().clone().requires_grad_()
    loss, metrics = objective(batch | {"log_prob": log_prob})  # no totals: the batch is the step
    loss.backward()
    agree((loss.detach(), log_prob.grad, metrics), whole)
    loss, gradient, metrics = run_step(objective, {word: tensor[order] for word, tensor in batch.items()}, pieces)
    agree((loss, gradient, metrics), (whole[0], whole[1][order], whole[2]))


@pytest.mark.parametrize("width", [1, 500])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("denominator", ["original", "kept"])
@pytest.mark.parametrize("weights", WEIGHT_CHOICES, ids=range(len(WEIGHT_CHOICES)))
def test_right_padding_changes_nothing(width, mode, denominator, weights):
    objective = Objective(
        surrogate=CLIP,
        weights=weights,
        penalties=[KL],
        aggregation={"mode": mode, "denominator": denominator, "max_length": 9},
    )
    batch = ragged_batch(dtype=torch.float64)
    length = batch["response_mask"].shape[1]
    padded = {
        word: torch.nn.functional.pad(x, (0, width), value=0 if word == "response_mask" else math.nan)
        for word, x in batch.items()
        if word != "advantages"
    }
    loss, gradient, metrics = run_step(
        objective, padded | {"advantages": batch["advantages"]}, [slice(0, 2), slice(2, 5)]
    )
    expected = run_step(objective, batch, [slice(None)])
    agree((loss, gradient[:, :length], metrics), expected)
    assert (gradient[:, length:] == 0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_a_row_without_a_live_token_changes_nothing(mode, denominator):
    objective = Objective(
        surrogate=CLIP,
        weights=[ICEPOP],
        penalties=[KL],
        aggregation={"mode": mode, "denominator": denominator, "max_length": 10},
    )
    batch = golden_batch()
    more = {word: torch.cat([tensor.detach(), torch.zeros_like(tensor[:1])]) for word, tensor in batch.items()}
    torch.testing.assert_close(objective.totals(more), objective.totals(batch), rtol=0, atol=0)
    torch.testing.assert_close(objective(more), objective(batch), rtol=1e-12, atol=1e-12)


def test_the_mean_weight_of_the_step_is_used_and_not_the_micro_batchs():
    # Two rows with weights 0.5 and 2: normalised over the step 0.4 and 1.6, over each row alone 1 and 1.
    batch = golden_batch() | {"response_mask": torch.tensor([[1, 0, 0], [1, 0, 0]])}
    batch["old_log_prob"] = batch["log_prob"].detach().clone()
    batch["rollout_log_prob"] = batch["log_prob"].detach() - torch.tensor([[0.5], [2.0]]).log()
    tis = {"name": "importance", "high": 2.0, "normalize": True}
    objective = Objective(surrogate=CLIP, weights=[tis], aggregation=TOKEN_MEAN)
    _, gradient, metrics = run_step(objective, batch, [slice(0, 1), slice(1, 2)])
    assert_near(gradient[:, 0], [-0.4 * 2 / 2, 1.6 / 2], rtol=1e-6)
    assert_near(metrics["ess/mean"], 2.5**2 / (2 * 4.25), rtol=1e-6)


def test_nothing_to_train_on_is_0_with_a_zero_gradient():
    for mode in MODES:
        for denominator in ("original", "kept"):
            objective = Objective(
                surrogate=CLIP,
                weights=[{**ICEPOP, "normalize": True}],
                penalties=[KL],
                aggregation={"mode": mode, "denominator": denominator, "max_length": 9},
            )
            for shape in ((2, 3), (0, 3)):
                batch = ragged_batch(mask=torch.zeros(shape, dtype=torch.int64))
                batch["log_prob"] = torch.full(shape, math.nan, requires_grad=True)
                loss, metrics = objective(batch)
                loss.backward()
                assert loss == 0 and (batch["log_prob"].grad == 0).all()
                assert all(metric == 0 for metric in metrics.values())


def test_a_step_whose_tokens_are_all_dropped_is_0():
    batch = golden_batch()
    batch["rollout_log_prob"] = batch["old_log_prob"] - 10
    for denominator in ("original", "kept"):
        aggregation = {"mode": "token-mean", "denominator": denominator}
        loss, _ = Objective(surrogate=CLIP, weights=[ICEPOP], aggregation=aggregation)(batch)
        (gradient,) = torch.autograd.grad(loss, batch["log_prob"])
        assert loss == 0 and (gradient == 0).all()


def test_bypass_puts_the_rollout_policy_in_the_place_of_the_old_one():
    batch = golden_batch()
    recompute = Objective(surrogate=CLIP, aggregation=TOKEN_MEAN)
    bypass = Objective(surrogate=CLIP, aggregation=TOKEN_MEAN, old_log_prob="bypass")
    expected, metrics = recompute(batch | {"old_log_prob": batch["rollout_log_prob"]})
    without = {word: tensor for word, tensor in batch.items() if word != "old_log_prob"}
    loss, found = bypass(without)
    torch.testing.assert_close((loss, found), (expected, metrics), rtol=0, atol=0)
    torch.testing.assert_close(bypass(batch)[0], expected, rtol=0, atol=0)  # old_log_prob is not read
    assert not math.isclose(expected.item(), recompute(batch)[0].item())
    assert "rollout_log_prob" in bypass.reads and "old_log_prob" not in bypass.reads


def test_penalties_add_up_with_their_coefficients_over_every_trainable_token():
    batch = golden_batch()
    base = Objective(surrogate=CLIP, weights=[ICEPOP], aggregation=TOKEN_MEAN)(batch)[0]
    penalties = [KL, {"name": "kl", "estimator": "k1", "coefficient": 0.5}]
    loss, metrics = Objective(surrogate=CLIP, weights=[ICEPOP], penalties=penalties, aggregation=TOKEN_MEAN)(batch)
    # k1 = log current - log ref: -log 2, 0, 0 | log 2, so nothing; k3 sums to 1/2.
    assert_near((loss - base).detach(), 0.1 * 0.5 / 4, rtol=1e-9)
    assert_near(metrics["penalties/kl/mean"], 0.5 / 4)
    assert_near(metrics["penalties/kl_2/mean"], 0.0)
    assert metrics["penalties/kl_2/count"] == 4


def test_an_objective_changes_no_argument():
    batch = golden_batch()
    copies, versions = ({w: f(t) for w, t in batch.items()} for f in (torch.clone, lambda t: t._version))
    objective = Objective(
        surrogate=CLIP, weights=[{**ICEPOP, "normalize": True}], penalties=[KL], aggregation=TOKEN_MEAN
    )
    totals = objective.totals(batch)
    before = dict(totals)
    objective(batch, totals)
    assert totals == before
    for word, tensor in batch.items():
        torch.testing.assert_close(tensor, copies[word], rtol=0, atol=0, equal_nan=True)
        assert tensor._version == versions[word]


def test_a_recipe_gives_the_objective_that_it_says():
    batch = ragged_batch()
    expected = Objective(surrogate=CLIP, aggregation=TOKEN_MEAN)(batch)
    recipe = load_recipe("dapo")
    for source in (recipe, recipe.model_dump()):
        torch.testing.assert_close(Objective.from_recipe(source)(batch), expected, rtol=0, atol=0)


# What is refused.


def test_two_methods_that_count_the_same_ratio_are_refused():
    with pytest.raises(ValueError, match=r"weights/importance_2 counts old/rollout, which weights/importance counts"):
        Objective(surrogate=CLIP, weights=[ICEPOP, {"name": "importance"}], aggregation=TOKEN_MEAN)


def test_an_engine_weight_is_refused_where_the_anchor_is_the_rollout_policy():
    with pytest.raises(ValueError, match=r"counts old/rollout, which surrogate/ppo_clip .*bypass"):
        Objective(surrogate=CLIP, weights=[ICEPOP], aggregation=TOKEN_MEAN, old_log_prob="bypass")


@pytest.mark.parametrize("word", ["rollout_log_prob", "old_log_prob", "response_mask"])
def test_a_batch_without_a_word_is_refused_by_both_calls(word):
    batch = golden_batch()
    del batch[word]
    objective = Objective(surrogate=CLIP, weights=[ICEPOP], aggregation=TOKEN_MEAN)
    for call in (objective, objective.totals):
        for broken in (batch, batch | {word: None}):
            with pytest.raises(ValueError, match=f"the batch has no {word}, which "):
                call(broken)


@pytest.mark.parametrize("word", ["log_prob", "advantages", "ref_log_prob"])
def test_a_batch_without_a_word_of_the_loss_is_refused(word):
    batch = golden_batch()
    del batch[word]
    objective = Objective(surrogate=CLIP, penalties=[KL], aggregation=TOKEN_MEAN)
    with pytest.raises(ValueError, match=f"the batch has no {word}, which (surrogate/ppo_clip|penalties/kl) reads"):
        objective(batch)
    assert objective.totals(batch)["tokens"] == 4


def test_a_word_that_nothing_reads_may_be_missing():
    batch = golden_batch()
    needed = {word: batch[word] for word in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    objective = Objective(surrogate=CLIP, aggregation=TOKEN_MEAN)
    assert_near(objective(needed)[0].detach(), (-2.5 - 2.56 - 1.5 + 0.8) / 4, rtol=1e-9)
    assert set(objective.reads) == set(needed)
    with pytest.raises(ValueError, match="no rollout_log_prob, .*no log-probs to correct with"):
        Objective(surrogate=CLIP, weights=[ICEPOP], aggregation=TOKEN_MEAN)(needed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"surrogate": {"name": "ppo_clop"}}, "surrogate: 'ppo_clop' is unknown; one of ppo_clip"),
        ({"surrogate": {}}, "surrogate: 'None' is unknown"),
        ({"surrogate": {**CLIP, "clip_hihg": 0.3}}, r"surrogate/ppo_clip: unknown \['clip_hihg'\]; allowed: clip_low"),
        ({"surrogate": {**CLIP, "clip_low": 2.0}}, "surrogate/ppo_clip: clip_low: 2.0"),
        ({"surrogate": {**CLIP, "coefficient": 2.0}}, r"unknown \['coefficient'\]"),
        ({"weights": [{"name": "tis"}]}, "weights: 'tis' is unknown; one of importance"),
        ({"weights": [{"name": "importance", "mean": 2.0}]}, r"weights/importance: unknown \['mean'\]"),
        (
            {"weights": [{"name": "importance", "level": "sequence"}]},
            "weights/importance: level: 'sequence' is unknown",
        ),
        ({"masks": [{"name": "importance"}]}, "masks: 'importance' is unknown"),
        ({"penalties": [{"name": "kl", "estimator": "k4", "coefficient": 1.0}]}, "penalties/kl: estimator: 'k4'"),
        ({"penalties": [{"name": "kl", "coefficient": -1.0}]}, "penalties/kl: coefficient: -1.0"),
        ({"aggregation": {"mode": "mean"}}, "mode: 'mean' is unknown"),
        ({"aggregation": {}}, "mode: 'None' is unknown"),
        ({"aggregation": {"mode": "seq-mean-token-sum-norm"}}, "needs max_length"),
        ({"aggregation": {"mode": "token-mean", "denominator": "all"}}, "aggregation.denominator: 'all' is unknown"),
        ({"aggregation": {"mode": "token-mean", "norm": 3}}, r"aggregation: unknown \['norm'\]; allowed: mode"),
        ({"old_log_prob": "rollout"}, "old_log_prob: 'rollout' is unknown; one of recompute, bypass"),
    ],
)
def test_an_unknown_name_key_or_value_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Objective(**({"surrogate": CLIP, "aggregation": TOKEN_MEAN} | arguments))


def test_a_shape_that_differs_is_refused():
    batch = golden_batch() | {"rollout_log_prob": torch.zeros(2, 1)}
    objective = Objective(surrogate=CLIP, weights=[ICEPOP], aggregation=TOKEN_MEAN)
    for call in (objective, objective.totals):
        with pytest.raises(ValueError, match="^rollout_log_prob has shape"):
            call(batch)


# Places.


def reinforce(log_prob, advantages, response_mask, *, scale=1.0):
    keep = bool_mask(response_mask)
    return -scale * torch.where(keep, log_prob, 0.0) * advantages[:, None], {}


def keep_first(response_mask, *, number):
    first = torch.arange(response_mask.shape[1]) < number
    return bool_mask(response_mask) & first, {"kept/count": first.sum()}


@pytest.fixture
def toys(monkeypatch):
    """Places of the test's own, in which a surrogate and a mask of its own stand beside the real ones."""
    surrogates, masks = Place("surrogate"), Place("masks")
    for place, registered in ((surrogates, SURROGATES), (masks, MASKS)):
        for name, term in registered.items():
            place.add(name, term.core, counts=term.counts, choices=term.choices, internal=term.internal)
    surrogates.add("reinforce", reinforce)
    surrogates.add("total_clip", ppo_clip, counts=frozenset({"engine", "update"}))
    masks.add("keep_first", keep_first)
    monkeypatch.setattr("trimtab.objective.compose.SURROGATES", surrogates)
    monkeypatch.setattr("trimtab.objective.compose.MASKS", masks)
    return surrogates, masks


def test_a_surrogate_of_ones_own_works(toys):
    # Live log-probs times A: (log 1.25 + log 1.5 + log 0.75 - 4.5) * 2 - (log 0.75 - 1.5), over 4, times -3.
    batch = golden_batch()
    objective = Objective(surrogate={"name": "reinforce", "scale": 3.0}, aggregation=TOKEN_MEAN)
    expected = -3 * (2 * (math.log(1.25 * 1.5 * 0.75) - 4.5) - (math.log(0.75) - 1.5)) / 4
    assert_near(objective(batch)[0].detach(), expected, rtol=1e-9)
    assert objective.reads.keys() == {"log_prob", "advantages", "response_mask"}
    # It needs no old policy, and neither does the objective.
    needed = {word: batch[word] for word in ("log_prob", "advantages", "response_mask")}
    loss, metrics = objective(needed)
    assert_near(loss.detach(), expected, rtol=1e-9)
    assert metrics["tokens/count"] == 4 and "kl/mean" not in metrics


def test_a_mask_of_ones_own_drops_tokens_and_keeps_or_changes_the_denominator(toys):
    for denominator, count in (("original", 4), ("kept", 3)):
        objective = Objective(
            surrogate=CLIP,
            masks=[{"name": "keep_first", "number": 2}],
            penalties=[KL],
            aggregation={"mode": "token-mean", "denominator": denominator},
        )
        loss, metrics = objective(golden_batch())
        assert_near(loss.detach(), (-2.5 - 2.56 + 0.8) / count + 0.1 * 0.5 / 4, rtol=1e-9)
        assert metrics["masks/keep_first/kept/count"] == 2
    # A dropped token gets no gradient, and two masks keep what both keep.
    batch = golden_batch()
    for numbers in ((3, 1), (1, 3)):
        masks = [{"name": "keep_first", "number": number} for number in numbers]
        loss, _ = Objective(surrogate=CLIP, masks=masks, aggregation=TOKEN_MEAN)(batch)
        (gradient,) = torch.autograd.grad(loss, batch["log_prob"])
        assert_near(gradient, [[-2.5 / 4, 0.0, 0.0], [0.0, 0.0, 0.0]], rtol=1e-9)


def test_weights_of_ones_own_are_multiplied(monkeypatch):
    # IcePop 0, 1.5, 3 | 2 times a constant 0.5 times another 3: the surrogate's -6.74, weighted once, times 1.5.
    weights = Place("weights")
    importance = WEIGHTS["importance"]
    weights.add("importance", importance.core, counts=importance.counts, internal=importance.internal)
    weights.add("constant", lambda response_mask, *, factor: (torch.full(response_mask.shape, factor), {}))
    monkeypatch.setattr("trimtab.objective.compose.WEIGHTS", weights)
    factors = [{"name": "constant", "factor": 0.5}, {"name": "constant", "factor": 3.0}]
    for order in ([ICEPOP, *factors], [*factors, ICEPOP]):
        objective = Objective(surrogate=CLIP, weights=order, aggregation=TOKEN_MEAN)
        assert_near(objective(golden_batch())[0].detach(), -6.74 * 1.5 / 4, rtol=1e-9)
        assert objective.totals(golden_batch())["kept_tokens"] == 3


def test_a_key_without_a_default_must_be_given(toys):
    with pytest.raises(ValueError, match="masks/keep_first: number must be given"):
        Objective(surrogate=CLIP, masks=[{"name": "keep_first"}], aggregation=TOKEN_MEAN)


def test_a_surrogate_on_the_total_ratio_refuses_an_engine_weight(toys):
    Objective(surrogate={"name": "total_clip"}, aggregation=TOKEN_MEAN)
    with pytest.raises(ValueError, match="weights/importance counts old/rollout, which surrogate/total_clip counts"):
        Objective(surrogate={"name": "total_clip"}, weights=[ICEPOP], aggregation=TOKEN_MEAN)


def test_a_name_is_given_once():
    place = Place("surrogate")
    place.add("mine", reinforce)
    with pytest.raises(ValueError, match="surrogate 'mine' is there already"):
        place.add("mine", ppo_clip)
    assert place["mine"].core is reinforce and list(place) == ["mine"] and len(place) == 1
    for registry in (SURROGATES, WEIGHTS, PENALTIES):
        name = next(iter(registry))
        with pytest.raises(ValueError, match="is there already"):
            registry.add(name, reinforce)
        assert registry[name].core is not reinforce


def test_a_core_that_no_batch_can_feed_is_refused():
    place = Place("surrogate")
    with pytest.raises(ValueError, match=r"reads \['logits'\], but a batch holds"):
        place.add("mine", lambda logits, response_mask: None)
    with pytest.raises(ValueError, match=r"has choices for \['level'\]"):
        place.add("mine", reinforce, choices={"level": ("token",)})
    assert not place and "mine" not in place
    with pytest.raises(ValueError, match="surrogate: 'mine' is unknown"):
        place["mine"]


def test_a_term_reads_its_core():
    term = Term("kl", PENALTIES["kl"].core)
    assert term.reads == ("log_prob", "ref_log_prob", "response_mask")
    assert term.reads_if_present == ("old_log_prob",)
    assert list(term.keys) == ["estimator"] and term.keys["estimator"].default == "k3"
    hidden = WEIGHTS["importance"]
    assert "mean" not in hidden.keys and "normalize" in hidden.keys
