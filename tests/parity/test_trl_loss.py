"""Our loss in TRL's trainer against TRL's own, value and gradient, in float64; and where ours differs on purpose."""

import pytest
import torch
from trl import GRPOTrainer

from tests.parity.trl_steps import (
    MAX_LENGTH,
    loss_and_gradient,
    micro_batch,
    our_trainer,
    refuse,
    trl_denominators,
    trl_trainer,
    with_policies,
)

SURROGATE = "objective.surrogate={name: ppo_clip, clip_low: 0.2, clip_high: 0.28}"
MODES = {
    "grpo": "{mode: seq-mean-token-mean}",
    "bnpo": "{mode: token-mean}",
    "dapo": "{mode: token-mean}",
    "dr_grpo": f"{{mode: seq-mean-token-sum-norm, max_length: {MAX_LENGTH}}}",
}
PENALTIES = {
    "no-kl": "[]",
    "k3": "[{name: kl, estimator: k3, coefficient: 0.3}]",
    "unbiased": "[{name: kl, estimator: unbiased, coefficient: 0.3}]",
}


def pair(model_path, folder, loss_type, kl):
    beta = {"beta": 0.0 if kl == "no-kl" else 0.3, "use_bias_correction_kl": kl == "unbiased"}
    theirs = trl_trainer(model_path, folder, loss_type, **beta)
    overrides = (SURROGATE, f"objective.penalties={PENALTIES[kl]}", f"objective.aggregation={MODES[loss_type]}")
    return theirs, our_trainer(model_path, folder, *overrides)


@pytest.mark.parametrize("kl", PENALTIES)
@pytest.mark.parametrize("loss_type", MODES)
def test_equals_trl_on_its_own_denominators(model_path, tmp_path, monkeypatch, loss_type, kl):
    theirs, ours = pair(model_path, tmp_path, loss_type, kl)
    inputs = with_policies(theirs, micro_batch())
    expected = loss_and_gradient(theirs, inputs)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", refuse)
    monkeypatch.setattr(ours, "_step_totals", lambda: trl_denominators(loss_type, inputs))
    found = loss_and_gradient(ours, inputs)
    assert expected[1].abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_bnpo_of_trl_depends_on_the_micro_batches_and_ours_does_not(model_path, tmp_path):
    theirs, ours = pair(model_path, tmp_path, "bnpo", "no-kl")
    parts = [
        with_policies(theirs, micro_batch(lengths=lengths, seed=i))
        for i, lengths in enumerate([(6, 6, 6, 6), (1, 1, 2, 1)])
    ]
    whole = joined(parts)
    theirs_split = sum(loss_and_gradient(theirs, part)[0] for part in parts)
    theirs.current_gradient_accumulation_steps = 1
    theirs_whole = loss_and_gradient(theirs, whole)[0]
    assert (theirs_split - theirs_whole).abs() > 0.05
    split, gradient = our_step(ours, parts)
    at_once, gradient_at_once = our_step(ours, [whole])
    torch.testing.assert_close(split, theirs_whole, rtol=0, atol=1e-10)
    torch.testing.assert_close((split, gradient), (at_once, gradient_at_once), rtol=0, atol=1e-10)


def test_grpo_of_trl_counts_a_masked_row_and_ours_does_not(model_path, tmp_path):
    theirs, ours = pair(model_path, tmp_path, "grpo", "no-kl")
    inputs = with_policies(theirs, micro_batch(lengths=(6, 3, 0, 5)))
    theirs.current_gradient_accumulation_steps = 1
    # Scaled before the backward pass: the model's norms round it to float32 on the way.
    expected = loss_and_gradient(theirs, inputs, scale=4 / 3)
    torch.testing.assert_close(our_step(ours, [inputs]), expected, rtol=0, atol=1e-10)


def joined(parts):
    names = [name for name, value in parts[0].items() if value.dim()]
    return {name: torch.cat([part[name] for part in parts]) for name in names} | {
        "num_items_in_batch": torch.tensor(37)
    }


def our_step(trainer, parts):
    """One optimizer step of ours over these micro-batches, by the trainer's own totals."""
    trainer._buffered_inputs, trainer._totals, trainer._step = parts, None, 0
    trainer.args.gradient_accumulation_steps = trainer.args.steps_per_generation = len(parts)
    loss, gradient = torch.zeros((), dtype=torch.float64), 0
    for part in parts:
        share, share_gradient = loss_and_gradient(trainer, part)
        loss, gradient = loss + share, gradient + share_gradient
        trainer._step += 1
    return loss, gradient
