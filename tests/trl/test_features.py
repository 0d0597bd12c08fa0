"""TRL's features under a recipe: adapters, evaluation, accumulation, mixtures of experts, and steps with no signal."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback, set_seed

from tests.trl import runs, tiny
from trl_ext import TrimtabGRPOTrainer

KL = "objective.penalties=[{name: kl, estimator: k3, coefficient: 0.5}]"
TWO_UPDATES = "training={mini_batch_size: 8, steps: 2}"
EOS = 1


# Adapters


def lora():
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])


@pytest.mark.parametrize("penalty", [(), (KL,)], ids=["plain", "kl"])
def test_lora_trains_the_adapter_alone_against_the_model_without_it(model_path, tmp_path, penalty):
    config = runs.arguments(tmp_path, TWO_UPDATES, *penalty, logging_steps=1)
    run = runs.trainer(model_path, config, peft_config=lora())
    before = runs.snapshot(run.model)
    run.train()
    after = runs.snapshot(run.model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert run.ref_model is None
    found = [entry.get("penalties/kl/mean") for entry in runs.logs(run)]
    if not penalty:
        assert found == [None] * 4
        return
    assert found[0] == pytest.approx(0, abs=1e-9)
    assert all(value > 1e-6 for value in found[1:])
    inputs = run._buffered_inputs[0]
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    size = inputs["completion_ids"].size(1)
    with torch.no_grad(), run.model.disable_adapter():
        base = run._get_per_token_logps_and_entropies(run.model, ids, mask, size)[0]
    torch.testing.assert_close(inputs["ref_per_token_logps"], base, rtol=0, atol=1e-5)


def test_an_adapter_that_is_trained_on_has_its_own_start_as_reference(model_path, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3)
    run = runs.trained(model, runs.arguments(tmp_path, TWO_UPDATES, KL, logging_steps=1))
    found = [entry["penalties/kl/mean"] for entry in runs.logs(run)]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[1] > 1e-5
    weights = runs.snapshot(run.model)
    adapters = {name for name in weights if ".default." in name}
    assert any(not torch.equal(weights[name], weights[name.replace(".default.", ".ref.")]) for name in adapters)


# Evaluation


class Apart(TrimtabGRPOTrainer):
    """Evaluates with random numbers of its own."""

    def evaluate(self, *args, **kwargs):
        self.groups = []
        with torch.random.fork_rng():
            return super().evaluate(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            self.groups.append(output["advantages"].view(-1, 2))
        return output


def test_evaluation_measures_and_leaves_training_alone(model_path, tmp_path):
    """But for random numbers: evaluation samples too, so that later answers of the training differ."""
    results = []
    for folder, options in (
        ("without", {}),
        ("with", {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}),
    ):
        config = runs.arguments(tmp_path / folder, TWO_UPDATES, logging_steps=1, **options)
        results.append(runs.trained(model_path, config, kind=Apart, eval_dataset=tiny.prompts(6)))
    plain, evaluated = results
    assert torch.equal(tiny.flat_weights(plain.model), tiny.flat_weights(evaluated.model))
    times = ("time", "runtime")
    same = [
        [{k: v for k, v in entry.items() if not any(t in k for t in times)} for entry in runs.logs(run)]
        for run in results
    ]
    assert same[0] == same[1]
    assert not any(name.startswith("eval_") for entry in same[1] for name in entry)
    found = [entry for entry in evaluated.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in found] == [1, 2, 3, 4]
    for entry in found:
        assert entry["eval_surrogate/ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert entry["eval_tokens/count"] > 0
        assert entry["eval_entropy/mean"] > 0
        assert math.isfinite(entry["eval_loss"])
        assert math.isfinite(entry["eval_reward"])
    assert len({entry["eval_reward"] for entry in found}) > 1
    groups = torch.cat(evaluated.groups)
    assert len(groups) == 6
    torch.testing.assert_close(groups.sum(dim=1), torch.zeros(6), rtol=0, atol=1e-5)
    assert groups.abs().max() > 0.5


# Windows of several updates, made of several micro-batches


class Whole(TrimtabGRPOTrainer):
    """Each batch is an update of its own, so that its own sums are the update's."""

    def _step_totals(self):
        return None


@pytest.mark.slow
def test_several_windows_in_micro_batches_of_any_size(model_path, tmp_path):
    """Two windows of sixteen answers, two updates of eight, twice over them."""
    sizes = "training={{mini_batch_size: 8, micro_batch_size: {}, epochs_per_rollout: 2, steps: 2}}"
    results = []
    for rows in (8, 4, 2):  # a group has four
        config = runs.arguments(tmp_path / str(rows), sizes.format(rows), logging_steps=1)
        assert (config.gradient_accumulation_steps, config.steps_per_generation) == (8 // rows, 16 // rows)
        results.append(runs.trained(model_path, config))
    first = results[0]
    for run in results:
        assert run.state.global_step == 8
        torch.testing.assert_close(tiny.flat_weights(run.model), tiny.flat_weights(first.model), rtol=0, atol=5e-5)
        found = runs.logs(run)
        assert ["on_policy_gap/max" in entry for entry in found] == [True, False, False, False] * 2
        for entry, other in zip(found, runs.logs(first), strict=True):
            for name in ("loss", "grad_norm", "entropy/mean", "surrogate/ratio/max", "kl/mean", "tokens/count"):
                assert entry[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    whole = runs.trained(model_path, runs.arguments(tmp_path / "whole", sizes.format(8), logging_steps=1), kind=Whole)
    assert torch.equal(tiny.flat_weights(whole.model), tiny.flat_weights(first.model))
    found = runs.logs(first)
    assert [entry["on_policy_gap/max"] for entry in (found[0], found[4])] == pytest.approx([0, 0], abs=1e-5)
    assert all(found[i]["kl/mean"] > 1e-8 for i in (1, 2, 3, 5, 6, 7))
    assert found[2]["tokens/count"] == found[0]["tokens/count"]  # the same answers again


def test_checkpointed_activations_change_nothing(model_path, tmp_path):
    """TRL turns them on unless told otherwise."""
    results = [
        runs.trained(model_path, runs.arguments(tmp_path / str(on), TWO_UPDATES, gradient_checkpointing=on))
        for on in (False, True)
    ]
    assert results[1].model.is_gradient_checkpointing
    assert torch.equal(*(tiny.flat_weights(run.model) for run in results))


def test_a_reference_that_follows_the_policy_holds_nothing_back(model_path, tmp_path):
    """With one update a rollout it is the policy itself, and the penalty's gradient is 0."""
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    results = [
        runs.trained(model_path, runs.arguments(tmp_path / name, *penalty, **options))
        for name, penalty, options in (("none", (), {}), ("synced", (KL,), synced), ("fixed", (KL,), {}))
    ]
    none, followed, fixed = (tiny.flat_weights(run.model) for run in results)
    torch.testing.assert_close(followed, none, rtol=0, atol=1e-5)
    assert (fixed - none).abs().max() > 1e-4


# Mixtures of experts


def mixture_of_experts(tok):
    set_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tok),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            eos_token_id=tok.eos_token_id,
            pad_token_id=tok.pad_token_id,
            bos_token_id=None,
        )
    )


def test_the_load_balancing_loss_of_experts_is_added(tmp_path):
    """Rewards are equal, so that it is the whole loss; with two micro-batches, their mean."""
    tok, found = tiny.tokenizer(), {}
    for coefficient in (0.0, 0.5):
        config = runs.arguments(
            tmp_path / str(coefficient),
            "training={mini_batch_size: 16, micro_batch_size: 8, steps: 1}",
            router_aux_loss_coef=coefficient,
            eval_strategy="steps",
            eval_steps=1,
        )
        options = {"reward_funcs": lambda completions, **_: [0.0] * len(completions), "processing_class": tok}
        run = runs.trained(mixture_of_experts(tok), config, eval_dataset=tiny.prompts(2), **options)
        found[coefficient] = (runs.logs(run)[0], runs.snapshot(run.model), run.state.log_history[1])
    start = runs.snapshot(mixture_of_experts(tok))
    log, weights, _ = found[0.0]
    assert "aux_loss/mean" not in log
    assert log["loss"] == log["grad_norm"] == 0
    assert all(torch.equal(start[name], weights[name]) for name in start)
    log, weights, evaluated = found[0.5]
    assert log["aux_loss/mean"] > 1
    assert log["loss"] == pytest.approx(0.5 * log["aux_loss/mean"], rel=1e-3)
    assert evaluated["eval_loss"] == pytest.approx(0.5 * evaluated["eval_aux_loss/mean"], rel=1e-3)
    assert any(not torch.equal(start[name], weights[name]) for name in start if "mlp.gate." in name)


# Steps with little or nothing to learn from


class WeightsByStep(TrainerCallback):
    def __init__(self):
        self.weights = []

    def on_step_end(self, args, state, control, model=None, **_):
        self.weights.append(tiny.flat_weights(model).clone())


def test_truncated_answers_are_left_out_and_a_step_of_them_alone_does_nothing(model_path, tmp_path):
    """In the first step no answer ends, in the second every other one does. Before any gradient, Adam has none too."""

    def rollout(prompts, trainer):
        ids = trainer.processing_class(text=prompts)["input_ids"]
        ends = [trainer.state.global_step > 0 and row % 2 == 0 for row in range(len(prompts))]
        answers = [[2 + row % 10, 3, 4, EOS if end else 5] for row, end in enumerate(ends)]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}

    watch = WeightsByStep()
    config = runs.arguments(tmp_path, mask_truncated_completions=True, logging_steps=1)
    run = runs.trainer(model_path, config, kind=runs.Watching, rollout_func=rollout, callbacks=[watch])
    start = tiny.flat_weights(run.model).clone()
    run.train()
    empty, half = runs.logs(run)
    assert (empty["loss"], empty["grad_norm"], empty["tokens/count"], empty["entropy/mean"]) == (0, 0, 0, 0)
    assert all(math.isfinite(value) for entry in (empty, half) for value in entry.values() if value is not None)
    assert torch.equal(watch.weights[0], start)
    assert half["tokens/count"] == 8 * 4
    assert half["grad_norm"] > 0
    assert not torch.equal(watch.weights[1], start)
    ended = (run.seen[1]["completion_ids"] == EOS).any(dim=1)
    gradient = run.log_probs[1].grad
    assert ended.sum() == 8
    assert gradient[~ended].abs().max() == 0
    assert gradient[ended].abs().max() > 0


def test_rewards_that_say_nothing(model_path, tmp_path):
    """Groups of four: equal rewards; one that is missing; an infinite one of either sign; and one of them alone."""
    inf, nan = math.inf, math.nan
    rewards = [0.3, 0.3, 0.3, 0.3] + [nan, 1.0, 0.0, 0.5] + [inf, 1.0, -inf, 0.0] + [nan, nan, nan, 2.0]
    config = runs.arguments(tmp_path, "training={mini_batch_size: 16, steps: 1}", logging_steps=1)
    run = runs.trainer(model_path, config, reward_funcs=lambda completions, **_: rewards, kind=runs.Watching)
    start = tiny.flat_weights(run.model).clone()
    run.train()
    half = 0.5**0.5
    expected = [0.0] * 4 + [0, 1, -1, 0] + [0, half, 0, -half] + [0.0] * 4
    assert list(run._logs["advantages"]) == pytest.approx(expected, abs=1e-4)
    assert run.seen[0]["advantages"].sort().values.tolist() == pytest.approx(sorted(expected), abs=1e-4)
    log = runs.logs(run)[0]
    assert math.isfinite(log["loss"])
    assert 0 < log["grad_norm"] < math.inf
    assert log["nonfinite/count"] == 0
    end = tiny.flat_weights(run.model)
    assert end.isfinite().all()
    assert not torch.equal(end, start)


def test_a_step_of_equal_rewards_does_nothing(model_path, tmp_path):
    config = runs.arguments(tmp_path, "training={mini_batch_size: 16, steps: 1}")
    run = runs.trainer(model_path, config, reward_funcs=lambda completions, **_: [0.1] * len(completions))
    start = tiny.flat_weights(run.model).clone()
    run.train()
    assert set(run._logs["advantages"]) == {0.0}
    assert runs.logs(run)[0]["grad_norm"] == 0
    assert torch.equal(tiny.flat_weights(run.model), start)
