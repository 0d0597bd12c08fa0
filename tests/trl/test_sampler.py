"""The sampler's own log-probs, recorded from transformers, and the corrections that act on them."""

import pytest
import torch
from peft import LoraConfig
from transformers import GenerationMixin

from tests.trl import runs
from trimtab.errors import TrimtabError


def seen_by(model_path, tmp_path, *overrides, **options):
    run = runs.trained(model_path, runs.arguments(tmp_path, *overrides), kind=runs.Watching, **options)
    return run, run.seen[0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_they_are_those_of_the_trainer_but_for_rounding(model_path, tmp_path, temperature):
    run, inputs = seen_by(model_path, tmp_path, f"rollout.temperature={temperature}")
    mask = inputs["completion_mask"].bool()
    lengths = mask.sum(dim=1)
    assert lengths.min() < lengths.max() == 6
    sampled, recomputed = inputs["sampling_per_token_logps"][mask], run.log_probs[0].detach()[mask]
    torch.testing.assert_close(sampled, recomputed, rtol=0, atol=2e-5)
    log = runs.logs(run)[0]
    assert log["mismatch/abs_diff/max"] < 2e-5
    assert log["mismatch/tokens/count"] == mask.sum()


def test_truncated_sampling_is_seen_as_the_mismatch_that_it_is(model_path, tmp_path):
    """With top_p below 1 the sampler draws from a renormalised set: its log-probs lie above the trainer's."""
    run, inputs = seen_by(model_path, tmp_path, "rollout.top_p=0.7")
    mask = inputs["completion_mask"].bool()
    gap = (inputs["sampling_per_token_logps"] - run.log_probs[0].detach())[mask]
    assert gap.min() > -2e-5 and gap.max() > 0.05
    assert runs.logs(run)[0]["mismatch/k1/mean"] > 0.01


def test_with_adapters_they_are_recorded_too(model_path, tmp_path):
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    run, inputs = seen_by(model_path, tmp_path, peft_config=adapters)
    mask = inputs["completion_mask"].bool()
    torch.testing.assert_close(
        inputs["sampling_per_token_logps"][mask], run.log_probs[0].detach()[mask], rtol=0, atol=2e-5
    )


def test_nothing_is_left_behind(model_path, tmp_path):
    original = GenerationMixin._get_logits_processor
    seen_by(model_path, tmp_path)
    assert GenerationMixin._get_logits_processor is original


CORRECTIONS = {
    "tis": "objective.weights=[{name: importance, level: token, bound: truncate, high: 1.02}]",
    "icepop": "objective.weights=[{name: importance, level: token, bound: mask, low: 0.9, high: 1.02}]",
    "mis": "objective.weights=[{name: importance, level: sequence_product, bound: mask, high: 0.9}]",
    "normalised": "objective.weights=[{name: importance, level: token, high: 2.0, normalize: true}]",
    "rejection": "objective.masks=[{name: rejection, statistic: sequence_geometric, low: 0.9, high: 1.1}]",
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_acts(model_path, tmp_path, name):
    """Sampled at top_p 0.7, so that the policies differ: the gradient is the uncorrected one times the weight."""
    options = ("rollout.top_p=0.7", "training={mini_batch_size: 16, steps: 1}")
    plain, _ = seen_by(model_path, tmp_path / "plain", *options)
    corrected, inputs = seen_by(model_path, tmp_path / name, *options, CORRECTIONS[name])
    log_b = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * inputs["completion_mask"]
    mask = inputs["completion_mask"].bool()
    token, product = log_b.exp(), log_b.sum(dim=1, keepdim=True).exp().expand_as(log_b)
    geometric = (log_b.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)).exp().expand_as(log_b)
    factor = {
        "tis": token.clamp(max=1.02),
        "icepop": token * ((token >= 0.9) & (token <= 1.02)),
        "mis": product * (product <= 0.9),
        "normalised": token / token[mask].mean(),
        "rejection": ((geometric >= 0.9) & (geometric <= 1.1)).float(),
    }[name]
    expected = plain.log_probs[0].grad * factor
    assert (factor[mask] - 1).abs().max() > 0.05
    torch.testing.assert_close(corrected.log_probs[0].grad, expected, rtol=1e-3, atol=1e-6)


def test_continuous_batching_returns_none_and_a_correction_is_refused(model_path, tmp_path):
    options = {"use_transformers_continuous_batching": True}
    with pytest.raises(TrimtabError, match="weights/importance corrects by the sampler's log-probs"):
        runs.trainer(model_path, runs.arguments(tmp_path, CORRECTIONS["tis"], **options))
