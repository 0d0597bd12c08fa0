"""CISPO, SAPO, GSPO and the four corrections for vLLM: ours in TRL's trainer against TRL's own, in float64."""

import pytest
import torch
from trl import GRPOTrainer

from tests.parity.trl_steps import (
    loss_and_gradient,
    micro_batch,
    our_trainer,
    refuse,
    trl_denominators,
    trl_trainer,
    with_policies,
)
from tests.trl import tiny

METHODS = {
    "cispo": (
        "cispo",
        {"epsilon_high": 1.3},
        ("objective.surrogate={name: cispo, cap: 1.3}", "objective.aggregation={mode: token-mean}"),
    ),
    "sapo": (
        "sapo",
        {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.25},  # TRL rounds them to float32
        ("objective.surrogate={name: sapo, tau_negative: 1.25}", "objective.aggregation={mode: seq-mean-token-mean}"),
    ),
    "gspo": (
        "grpo",
        {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.1},
        (
            "objective.surrogate={name: gspo, clip_low: 0.02, clip_high: 0.1}",
            "objective.aggregation={mode: seq-mean-token-mean}",
        ),
    ),
    "dual-clip": (
        "grpo",
        {"delta": 1.4},
        (
            "objective.surrogate={name: ppo_clip, clip_low: 0.2, clip_high: 0.28, dual_clip: 1.4}",
            "objective.aggregation={mode: seq-mean-token-mean}",
        ),
    ),
}
CORRECTIONS = {
    "token_truncate": "{name: importance, level: token, bound: truncate, low: 0.7, high: 1.2}",
    "token_mask": "{name: importance, level: token, bound: mask, low: 0.7, high: 1.2}",
    "sequence_truncate": "{name: importance, level: sequence_product, bound: truncate, low: 0.7, high: 1.2}",
    "sequence_mask": "{name: importance, level: sequence_product, bound: mask, low: 0.7, high: 1.2}",
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_equals_trls(model_path, tmp_path, monkeypatch, name):
    loss_type, options, overrides = METHODS[name]
    theirs = trl_trainer(model_path, tmp_path, loss_type, **options)
    ours = our_trainer(model_path, tmp_path, *overrides)
    inputs = with_policies(theirs, micro_batch())
    expected = loss_and_gradient(theirs, inputs)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", refuse)
    monkeypatch.setattr(ours, "_step_totals", lambda: trl_denominators(loss_type, inputs))
    assert expected[1].abs().max() > 1e-3
    torch.testing.assert_close(loss_and_gradient(ours, inputs), expected, rtol=0, atol=1e-10)


class VLLM:
    """In vLLM's place: answers of unequal lengths; log-probs off by up to half a nat a token, or an answer."""

    def __init__(self, *, by_answer=False, nan_at=None):
        self.by_answer, self.nan_at = by_answer, nan_at

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler=None):
        generator = torch.Generator().manual_seed(3)
        answers, log_probs = [], []
        for row in range(len(prompts)):
            length = 1 + row % 6
            answers.append(torch.randint(2, 14, (length,), generator=generator).tolist())
            noise = torch.rand(length, generator=generator) - 0.5
            noise = torch.full((length,), (row / 15 - 0.5) / length) if self.by_answer else noise
            log_probs.append([[-2.0 + value] for value in noise.tolist()])
        if self.nan_at is not None:
            row, column = self.nan_at
            log_probs[row][column] = [None]
        return None, answers, log_probs, None


def sampled(trainer, engine):
    """What TRL makes of sixteen answers of vLLM: the inputs of its loss, its own weights among them."""
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "colocate", -1
    trainer.vllm_generation = engine
    return trainer._generate_and_score_completions([row for row in tiny.prompts(4) for _ in range(4)])


def corrected_pair(model_path, tmp_path, monkeypatch, mode, engine):
    options = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": 0.7,
        "vllm_importance_sampling_clip_max": 1.2,
    }
    theirs = trl_trainer(model_path, tmp_path, "grpo", **options)
    near(theirs, monkeypatch)
    inputs = sampled(theirs, engine)
    ours = our_trainer(
        model_path,
        tmp_path,
        "objective.surrogate={name: ppo_clip, clip_low: 0.2, clip_high: 0.28}",
        f"objective.weights=[{CORRECTIONS[mode]}]",
        "objective.aggregation={mode: seq-mean-token-mean}",
    )
    near(ours, monkeypatch)
    sequences = torch.tensor(16.0 * 2)
    totals = {"tokens": torch.tensor(1.0), "sequences": sequences, "weight": sequences, "weight_square": sequences}
    monkeypatch.setattr(ours, "_step_totals", lambda: totals)
    return theirs, ours, inputs


def near(trainer, monkeypatch):
    """Log-probs of the trainer's model in a narrow band around vLLM's -2, with their gradient."""
    plain = trainer._get_per_token_logps_and_entropies

    def squeezed(*args, **kwargs):
        log_probs, entropy, aux = plain(*args, **kwargs)
        return -2.0 + 0.1 * torch.tanh(log_probs), entropy, aux

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", squeezed)


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_a_correction_equals_trls(model_path, tmp_path, monkeypatch, mode):
    theirs, ours, inputs = corrected_pair(model_path, tmp_path, monkeypatch, mode, VLLM(by_answer="sequence" in mode))
    weights = inputs["importance_sampling_ratio"]
    assert (weights == 0).any() if "mask" in mode else ((weights == 0.7).any() and (weights == 1.2).any())
    assert ((weights > 0.7) & (weights < 1.2)).any()
    expected = loss_and_gradient(theirs, inputs)
    assert expected[1].abs().max() > 1e-4
    torch.testing.assert_close(loss_and_gradient(ours, inputs), expected, rtol=0, atol=1e-7)


def test_a_log_prob_that_vllm_could_not_give_counts_1_in_trl_and_nothing_here(model_path, tmp_path, monkeypatch):
    theirs, ours, inputs = corrected_pair(model_path, tmp_path, monkeypatch, "token_truncate", VLLM(nan_at=(5, 2)))
    assert inputs["importance_sampling_ratio"][5, 2] == 1
    loss, _ = loss_and_gradient(theirs, inputs)
    inputs["importance_sampling_ratio"][5, 2] = 0
    expected = loss_and_gradient(theirs, inputs)
    assert (loss - expected[0]).abs() > 1e-4
    torch.testing.assert_close(loss_and_gradient(ours, inputs), expected, rtol=0, atol=1e-7)
