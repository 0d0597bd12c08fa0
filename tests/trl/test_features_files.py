"""What TRL reads and writes, under a recipe: arguments, checkpoints, tables of completions, streamed data."""

import dataclasses
import pickle

import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import TrlParser

from tests.trl import runs, tiny
from trimtab.errors import TrimtabError
from trl_ext import TrimtabConfig, TrimtabGRPOTrainer

TWO_UPDATES = "training={mini_batch_size: 8, steps: 3}"


# Arguments


def same(config, other):
    assert type(config) is type(other)
    for item in dataclasses.fields(config):
        if item.name not in ("logging_dir", "accelerator_config", "output_dir"):
            assert getattr(config, item.name) == getattr(other, item.name), item.name
    assert config.load_recipe() == other.load_recipe()


def test_arguments_are_pickled_written_and_copied(tmp_path):
    config = runs.arguments(tmp_path, TWO_UPDATES)
    same(pickle.loads(pickle.dumps(config)), config)
    text = config.to_json_string()
    assert '"recipe": "quickstart"' in text
    assert '"num_generations": 4' in text
    # TRL refuses the size it derived itself, in its own configuration too.
    same(dataclasses.replace(config, generation_batch_size=None), config)
    moved = dataclasses.replace(config, generation_batch_size=None, output_dir="elsewhere", logging_steps=7)
    assert (moved.output_dir, moved.logging_steps, moved.learning_rate) == ("elsewhere", 7, 1e-2)
    with pytest.raises(TrimtabError, match="learning_rate=0.5 contradicts the recipe"):
        dataclasses.replace(config, generation_batch_size=None, learning_rate=0.5)


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_a_parser_states_every_argument_and_only_what_was_given_counts(tmp_path, parser):
    given = ["--recipe", "quickstart", "--output_dir", str(tmp_path), "--use_cpu", "true", "--report_to", "none"]
    given += ["--overrides", "rollout.group_size=16", "training.steps=3"]
    given += ["--gradient_checkpointing", "false"]
    parse = parser(TrimtabConfig).parse_args_into_dataclasses if parser is HfArgumentParser else None

    def config(*more):
        arguments = [*given, *more]
        return parse(arguments)[0] if parse else parser(TrimtabConfig).parse_args_and_config(arguments)[0]

    direct = TrimtabConfig(
        str(tmp_path),
        recipe="quickstart",
        overrides=["rollout.group_size=16", "training.steps=3"],
        use_cpu=True,
        report_to="none",
        gradient_checkpointing=False,
    )
    same(config(), direct)
    assert (direct.num_generations, direct.max_steps, direct.learning_rate) == (16, 12, 3e-4)
    assert config("--learning_rate", "3e-4", "--logging_steps", "5").logging_steps == 5
    with pytest.raises(TrimtabError, match="beta=0.1 contradicts the recipe, where objective.penalties makes it 0.0"):
        config("--beta", "0.1")
    with pytest.raises(TrimtabError, match="epsilon_high=0.3 acts in TRL's loss"):
        config("--epsilon_high", "0.3")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"num_train_epochs": 5}, "in training.steps"),
        ({"warmup_ratio": 0.5}, "in optimizer.warmup_steps"),
        ({"generation_batch_size": 32}, "in rollout.prompts_per_step"),
        ({"vllm_importance_sampling_cap": 2.0}, "acts in TRL's loss"),
    ],
)
def test_no_argument_acts_beside_what_the_recipe_says(tmp_path, argument, message):
    with pytest.raises(TrimtabError, match=message):
        runs.arguments(tmp_path, **argument)


def test_a_parser_reads_a_recipe_from_a_file_of_arguments(tmp_path):
    file = tmp_path / "arguments.yaml"
    file.write_text(f"recipe: quickstart\noverrides: [training.steps=3]\noutput_dir: {tmp_path}\nuse_cpu: true\n")
    config = TrlParser(TrimtabConfig).parse_args_and_config(["--config", str(file)])[0]
    assert (config.max_steps, config.num_generations) == (6, 8)
    with pytest.raises(TrimtabError, match="num_generations=4 contradicts the recipe"):
        TrlParser(TrimtabConfig).parse_args_and_config(["--config", str(file), "--num_generations", "4"])


# Checkpoints


@pytest.mark.slow
def test_checkpoints_are_kept_and_resumed(model_path, tmp_path):
    """Six updates; a new trainer goes on from the third, in the middle of a window and of an entry of the log."""
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "logging_steps": 2}
    whole = runs.trained(model_path, runs.arguments(tmp_path / "whole", TWO_UPDATES, **options))
    names = sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))
    assert names == ["checkpoint-5", "checkpoint-6"]
    saved = torch.load(tmp_path / "whole" / "checkpoint-6" / "training_args.bin", weights_only=False)
    same(saved, whole.args)

    class Stops(TrimtabGRPOTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.control.should_training_stop = self.state.global_step == 2
            return loss

    stopped = runs.trained(model_path, runs.arguments(tmp_path / "parts", TWO_UPDATES, **options), kind=Stops)
    assert stopped.state.global_step == 3
    resumed = runs.trainer(model_path, runs.arguments(tmp_path / "parts", TWO_UPDATES, **options))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert torch.equal(tiny.flat_weights(resumed.model), tiny.flat_weights(whole.model))
    ours = ("tokens/count", "entropy/mean", "surrogate/ratio/max", "kl/mean")
    logged = [[[entry[name] for name in ours] for entry in runs.logs(run)[-2:]] for run in (whole, resumed)]
    assert logged[0] == logged[1]


def test_the_best_checkpoint_is_loaded_at_the_end(model_path, tmp_path):
    """By a metric of ours. Each checkpoint's weights are told apart by what they are."""
    config = runs.arguments(
        tmp_path,
        TWO_UPDATES,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_entropy/mean",
        greater_is_better=True,
        save_total_limit=1,
    )
    run = runs.trained(model_path, config, eval_dataset=tiny.prompts(2))
    found = {e["step"]: e["eval_entropy/mean"] for e in run.state.log_history if "eval_entropy/mean" in e}
    best = max(found, key=found.get)
    assert len(found) == 6
    assert run.state.best_metric == found[best]
    assert run.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    stored = AutoModelForCausalLM.from_pretrained(run.state.best_model_checkpoint)
    assert torch.equal(tiny.flat_weights(run.model), tiny.flat_weights(stored))


# Data and tables


def test_streamed_prompts_are_trained_on_as_stored_ones_are(model_path, tmp_path):
    seen = []

    def reward(completions, prompts, answer, **_):
        seen[-1].extend(prompts)
        return tiny.digit_reward(completions, answer)

    results = []
    for name, rows in (("stored", tiny.prompts(16)), ("streamed", tiny.prompts(16).to_iterable_dataset())):
        seen.append([])
        config = runs.arguments(
            tmp_path / name,
            "training={mini_batch_size: 8, micro_batch_size: 4, epochs_per_rollout: 2, steps: 2}",
            shuffle_dataset=False,
            logging_steps=1,
        )
        options = {"train_dataset": rows, "reward_funcs": reward, "processing_class": tiny.tokenizer()}
        results.append(runs.trained(model_path, config, **options))
    assert len(seen[0]) == 32
    assert seen[0] == seen[1]
    assert torch.equal(*(tiny.flat_weights(run.model) for run in results))


def test_the_table_of_completions_has_our_advantages(model_path, tmp_path, capsys):
    def reward(completions, answer, log_extra, **_):
        log_extra("wanted", list(answer))
        return tiny.digit_reward(completions, answer)

    config = runs.arguments(
        tmp_path,
        "training={mini_batch_size: 16, steps: 2}",
        "advantage={name: group, baseline: leave_one_out, scale: none}",
        log_completions=True,
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=2,
    )
    runs.trained(model_path, config, reward_funcs=reward, eval_dataset=tiny.prompts(2))
    assert "Completion" in capsys.readouterr().out
    tables = {int(path.stem[-5:]): pandas.read_parquet(path) for path in (tmp_path / "completions").glob("*.parquet")}
    assert set(tables) == {1, 2}
    rewards = torch.tensor(tables[1]["reward"].to_numpy().copy()).view(4, 4)
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / 3
    found = torch.tensor(tables[1]["advantage"].to_numpy().copy())
    torch.testing.assert_close(found, (rewards - others).flatten(), rtol=0, atol=1e-5)
    assert found.abs().max() > 0.1
    assert len(set(tables[1]["wanted"])) > 1
    # The last table is written after the evaluation, whose two groups of two pushed out one group of the training.
    assert len(tables[2]) == 16
    for rows, size in ((slice(0, 12), 4), (slice(12, 16), 2)):
        rewards, found = (
            torch.tensor(tables[2][name].to_numpy().copy())[rows].view(-1, size) for name in ("reward", "advantage")
        )
        others = (rewards.sum(dim=1, keepdim=True) - rewards) / (size - 1)
        torch.testing.assert_close(found, rewards - others, rtol=0, atol=1e-5)
