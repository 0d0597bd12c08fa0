"""Our loss in TRL's trainer against TRL's own, value and gradient, in float64; and where ours differs on purpose."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.trl import tiny
from trl_ext import TrimtabConfig, TrimtabGRPOTrainer

ACCUMULATION, WINDOWS, MAX_LENGTH = 2, 2, 6
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


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def trl_trainer(model_path, tmp_path, loss_type, kl):
    options = tiny.arguments(
        tmp_path / "trl",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=ACCUMULATION,
        steps_per_generation=ACCUMULATION * WINDOWS,
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0 if kl == "no-kl" else 0.3,
        use_bias_correction_kl=kl == "unbiased",
    )
    return prepared(tiny.trainer(GRPOTrainer, model_path, GRPOConfig(**options)))


def our_trainer(model_path, tmp_path, loss_type, kl):
    overrides = [
        "rollout={engine: transformers, group_size: 4, prompts_per_step: 4, max_length: 6}",
        "training={mini_batch_size: 8, micro_batch_size: 4, steps: 10}",
        "objective.surrogate={name: ppo_clip, clip_low: 0.2, clip_high: 0.28}",
        f"objective.penalties={PENALTIES[kl]}",
        f"objective.aggregation={MODES[loss_type]}",
    ]
    quiet = {
        "output_dir": str(tmp_path / "ours"),
        "use_cpu": True,
        "report_to": "none",
        "gradient_checkpointing": False,
    }
    config = TrimtabConfig(recipe="quickstart", overrides=overrides, disable_tqdm=True, **quiet)
    return prepared(tiny.trainer(TrimtabGRPOTrainer, model_path, config))


def prepared(trainer):
    """As in the middle of a step: in float64, training, with TRL's log-probs computed from plain logits."""
    trainer.model.double().train()
    trainer.current_gradient_accumulation_steps = ACCUMULATION

    def plain(model, input_ids, attention_mask, logits_to_keep, **_):
        hidden = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = model.lm_head(hidden)[:, -logits_to_keep - 1 : -1].log_softmax(-1)
        chosen = logits.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
        return chosen, -(logits.exp() * logits).sum(-1).detach(), None

    trainer._get_per_token_logps_and_entropies = plain
    return trainer


def micro_batch(*, lengths=(6, 3, 1, 5), seed=0):
    """Four rows of unequal lengths, whose old and reference policies are some way off."""
    generator = torch.Generator().manual_seed(seed)
    completion = torch.randint(2, 14, (4, MAX_LENGTH), generator=generator)
    mask = (torch.arange(MAX_LENGTH) < torch.tensor(lengths).unsqueeze(1)).long()
    noise = lambda: torch.randn(4, MAX_LENGTH, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "prompt_ids": torch.randint(2, 14, (4, 4), generator=generator),
        "prompt_mask": torch.ones(4, 4, dtype=torch.long),
        "completion_ids": completion,
        "completion_mask": mask,
        "advantages": torch.tensor([1.5, -0.5, -2.0, 0.7], dtype=torch.float64),
        "num_items_in_batch": torch.tensor(37),
        "noise": (noise() * 0.4, noise() * 0.4),
    }


def with_policies(trainer, inputs):
    """Old and reference log-probs at a fixed distance from the model's own: inside the clip range and outside it."""
    old_noise, ref_noise = inputs.pop("noise")
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        current, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, MAX_LENGTH)
    return inputs | {"old_per_token_logps": current + old_noise, "ref_per_token_logps": current + ref_noise}


def loss_and_gradient(trainer, inputs, *, scale=1.0):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs) * scale
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def trl_denominators(loss_type, inputs):
    """TRL's own: of the micro-batch times the accumulation, or of the generation batch scaled to one step."""
    tokens = {"bnpo": inputs["completion_mask"].sum() * ACCUMULATION, "dapo": inputs["num_items_in_batch"] / WINDOWS}
    sequences = torch.tensor(4.0 * ACCUMULATION)
    return {"tokens": tokens.get(loss_type, torch.tensor(1.0)), "sequences": sequences}


@pytest.mark.parametrize("kl", PENALTIES)
@pytest.mark.parametrize("loss_type", MODES)
def test_equals_trl_on_its_own_denominators(model_path, tmp_path, monkeypatch, loss_type, kl):
    theirs, ours = trl_trainer(model_path, tmp_path, loss_type, kl), our_trainer(model_path, tmp_path, loss_type, kl)
    inputs = with_policies(theirs, micro_batch())
    expected = loss_and_gradient(theirs, inputs)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", refuse)
    monkeypatch.setattr(ours, "_step_totals", lambda: trl_denominators(loss_type, inputs))
    found = loss_and_gradient(ours, inputs)
    assert expected[1].abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def refuse(*_):
    raise AssertionError("TRL's loss must not run under a recipe")


def test_bnpo_of_trl_depends_on_the_micro_batches_and_ours_does_not(model_path, tmp_path):
    theirs, ours = (
        trl_trainer(model_path, tmp_path, "bnpo", "no-kl"),
        our_trainer(model_path, tmp_path, "bnpo", "no-kl"),
    )
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
    theirs, ours = (
        trl_trainer(model_path, tmp_path, "grpo", "no-kl"),
        our_trainer(model_path, tmp_path, "grpo", "no-kl"),
    )
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
