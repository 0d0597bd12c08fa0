"""What the adapter relies on in TRL 1.16: signatures, attributes, the order of things. A failure names what moved."""

import inspect

import pytest
import trl
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from trl_ext.batch import MODEL_INPUTS, WORDS
from trl_ext.logs import NAMES
from trl_ext.translate import ARGUMENTS, REPLACED

SIGNATURES = {
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_compute_loss": ["self", "model", "inputs"],
    "_get_train_sampler": ["self", "dataset"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "log": ["self", "logs", "start_time"],
}


def test_the_pinned_version():
    assert trl.__version__.startswith("1.16.")


@pytest.mark.parametrize("method", SIGNATURES)
def test_signatures_of_what_we_override(method):
    function = inspect.unwrap(getattr(GRPOTrainer, method))
    assert list(inspect.signature(function).parameters) == SIGNATURES[method]


def test_the_constructor_starts_as_ours_does():
    assert list(inspect.signature(GRPOTrainer.__init__).parameters)[:5] == [
        "self",
        "model",
        "reward_funcs",
        "args",
        "train_dataset",
    ]


def test_log_probs_take_every_vision_input_and_return_three():
    function = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
    names = list(inspect.signature(function).parameters)
    assert names[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    assert {*MODEL_INPUTS, "compute_entropy", "compute_aux_loss"} == set(names[5:]) - {"batch_size"}
    assert "return logps, entropies, aux_loss" in inspect.getsource(function)


def test_every_argument_that_we_set_or_refuse_exists():
    fields = GRPOConfig.__dataclass_fields__
    assert set(ARGUMENTS) | set(REPLACED) <= set(fields)


def test_no_argument_of_the_loss_was_forgotten():
    """Every argument that TRL's loss reads is set by the recipe, refused beside one, or belongs to what we keep."""
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss)) + inspect.getsource(GRPOTrainer.__init__)
    loss = inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))
    read = {name for name in GRPOConfig.__dataclass_fields__ if f"self.args.{name}" in loss or f"self.{name}" in loss}
    assert "args." in source
    kept = {"router_aux_loss_coef", "num_completions_to_print", "max_completion_length", "steps_per_generation"}
    of_the_entropy_bonus = {"entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"}
    assert read - {*ARGUMENTS, *REPLACED} <= kept | of_the_entropy_bonus


def test_the_tensors_that_a_batch_is_made_of():
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._generate_and_score_completions))
    for name in (*WORDS.values(), "completion_mask", "tool_mask", "prompt_ids", "prompt_mask", "completion_ids"):
        assert f'"{name}"' in source, name


def test_the_names_of_the_log_that_we_rename():
    source = inspect.getsource(inspect.getmodule(GRPOTrainer))
    for name in NAMES:
        assert f'"{name}"' in source, name


def test_private_attributes_that_we_read():
    source = inspect.getsource(GRPOTrainer)
    for name in ("_step", "_buffered_inputs", "_metrics", "_logs", "_tokenizer"):
        assert f"self.{name}" in source, name
    init = inspect.getsource(GRPOTrainer.__init__)
    for name in ("num_generations_eval", "num_iterations", "aux_loss_enabled", "reward_weights", "eos_token_ids"):
        assert f"self.{name} =" in init, name


def test_the_sampler_draws_one_permutation_an_epoch_from_its_own_generator():
    sampler = RepeatSampler(range(7), mini_repeat_count=2, batch_size=3, seed=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert "torch.randperm(self.num_samples, generator=self.generator)" in inspect.getsource(RepeatSampler.__iter__)
