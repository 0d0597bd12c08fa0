"""Where TRL takes rewards and answers from, under a recipe: several rewards, a reward model, rollout functions."""

import asyncio
import functools

import pytest
import torch
from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification, set_seed

from tests.trl import runs, tiny
from trimtab.errors import TrimtabError

ONE_STEP = "training={mini_batch_size: 16, steps: 1}"
LEAVE_ONE_OUT = "advantage={name: group, baseline: leave_one_out, scale: none}"
EOS = 1


# Rewards


def without(rows, values):
    return [None if row in rows else value for row, value in enumerate(values)]


def counted(completions, log_metric, log_extra, trainer_state, **_):
    values = [float(len(text)) for text in completions]
    log_metric("mean_size", sum(values) / len(values))
    log_extra("size", values)
    assert trainer_state.global_step == 0
    return without({3}, values)


async def asked(completions, answer, **_):
    await asyncio.sleep(0)
    return without({3}, [float(text.count(digit)) for text, digit in zip(completions, answer, strict=True)])


class Sometimes:
    """An object that can be called, and scores every other row only."""

    def __call__(self, completions, completion_ids, scale=1.0, **_):
        return without(range(1, 16, 2), [scale * ids[0] for ids in completion_ids])


def test_several_rewards_with_weights_add_up_to_our_advantages(model_path, tmp_path):
    """Row 3 has no reward at all: 0, and its group has one answer less. TRL has no leave-one-out baseline."""
    functions = [counted, asked, functools.partial(Sometimes().__call__, scale=0.1)]
    weights = [0.25, 2.0, 1.0]
    config = runs.arguments(tmp_path, ONE_STEP, LEAVE_ONE_OUT, reward_weights=weights)
    run = runs.trained(model_path, config, reward_funcs=functions, kind=runs.Watching)
    rewards = torch.tensor([list(column) for column in run._logs["rewards"].values()], dtype=torch.float64)
    assert rewards.isnan().sum(dim=1).tolist() == [1, 1, 8]
    totals = (rewards * torch.tensor(weights).unsqueeze(1)).nansum(dim=0).tolist()
    expected = []
    for row, total in enumerate(totals):
        group = range(row - row % 4, row - row % 4 + 4)
        others = [totals[other] for other in group if other not in (row, 3)]
        expected.append(0.0 if row == 3 else total - sum(others) / len(others))
    assert list(run._logs["advantages"]) == pytest.approx(expected, abs=1e-5)
    assert max(expected) > 0.5
    used = run.seen[0]["advantages"].tolist()  # shuffled
    assert sorted(used) == pytest.approx(sorted(expected), abs=1e-5)
    log = runs.logs(run)[0]
    sizes = list(run._logs["extra"]["size"])
    assert log["mean_size"] == pytest.approx(sum(sizes) / 16)
    assert log["rewards/asked/mean"] == pytest.approx(rewards[1].nanmean().item())
    assert log["reward"] == pytest.approx(sum(total for row, total in enumerate(totals) if row != 3) / 15, abs=1e-5)
    assert run._logs["rewards"]["counted"][0] == sizes[0]


def test_a_reward_model(model_path, tmp_path):
    set_seed(1)
    config = Qwen3ForCausalLM.from_pretrained(model_path).config
    config.num_labels = 1
    judge = Qwen3ForSequenceClassification(config)
    with torch.no_grad():
        judge.score.weight.mul_(50)
    folder = tmp_path / "judge"
    judge.save_pretrained(folder)
    run = runs.trained(
        model_path,
        runs.arguments(tmp_path / "run", ONE_STEP, "advantage={name: group, scale: none}"),
        reward_funcs=str(folder),
        reward_processing_classes=tiny.tokenizer(),
    )
    rewards = torch.tensor(run._logs["rewards"]["judge"]).view(4, 4)
    assert rewards.std() > 0.01
    expected = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    torch.testing.assert_close(torch.tensor(run._logs["advantages"]), expected, rtol=0, atol=1e-5)
    assert runs.logs(run)[0]["grad_norm"] > 0


# Rollout functions


def given(completion, **fields):
    """A rollout function: the answer of each row, and what goes with every one."""

    def rollout(prompts, trainer):
        count = len(prompts)
        ids = trainer.processing_class(text=prompts)["input_ids"]
        answers = [completion(row) for row in range(count)]
        extra = {name: value(count) for name, value in fields.items()}
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None, **extra}

    return rollout


@pytest.mark.parametrize("masked", [True, False])
def test_tokens_of_an_environment_train_nothing(model_path, tmp_path, masked):
    """Two runs that differ in these tokens alone; they come last, so that no other token sees them."""
    fields = {
        "score": lambda count: [float(row % 4) for row in range(count)],
        "source": lambda count: "game",
        "logprobs": lambda count: [[-2.0] * 5] * count,
    }
    if masked:
        fields["env_mask"] = lambda count: [[1, 1, 0, 0, 0]] * count
    sources, results = set(), []

    def scored(completions, score, source, **_):
        sources.update(source)
        return score

    for foreign in ([4, 5, EOS], [9, 8, EOS]):

        def answer(row, foreign=foreign):
            return [2 + row % 7, 3 + row % 5, *foreign]

        config = runs.arguments(tmp_path / str(foreign[0]))
        options = {"rollout_func": given(answer, **fields), "reward_funcs": scored}
        results.append(runs.trained(model_path, config, kind=runs.Watching, **options))
    weights = [tiny.flat_weights(run.model) for run in results]
    assert torch.equal(*weights) == masked
    assert sources == {"game"}
    first = results[0]
    log = runs.logs(first)[0]
    assert log["reward"] == 1.5
    assert log["tokens/count"] == 16 * (2 if masked else 5)
    assert log["mismatch/rollout_nll/mean"] == pytest.approx(2)
    assert log["mismatch/tokens/count"] == log["tokens/count"]
    gradient = first.log_probs[0].grad
    learning = first.seen[0]["advantages"] != 0
    assert (gradient[learning, :2] != 0).all()
    assert (gradient[:, 2:] != 0).any() != masked


def test_a_correction_acts_on_the_log_probs_of_a_rollout_function(model_path, tmp_path):
    """With one update on a rollout TRL computes no old log-probs; the correction has them all the same."""
    weights = "objective.weights=[{name: importance, level: token, bound: truncate, low: 0.5, high: 1.5}]"
    fields = {
        "score": lambda count: [float(row % 4) for row in range(count)],
        "logprobs": lambda count: [[-2.0] * 3] * count,
    }
    results = []
    for overrides in ((), (weights,)):
        config = runs.arguments(tmp_path / str(len(overrides)), ONE_STEP, *overrides)
        rollout = given(lambda row: [2 + row % 7, 3 + row % 5, EOS], **fields)
        options = {"rollout_func": rollout, "reward_funcs": lambda completions, score, **_: score}
        results.append(runs.trained(model_path, config, kind=runs.Watching, **options))
    plain, corrected = results
    inputs = corrected.seen[0]
    ratio = (inputs["old_per_token_logps"] + 2.0).exp()
    expected = plain.log_probs[0].grad * ratio.clamp(0.5, 1.5)
    assert ratio.min() < 0.5 and ratio.max() > 1.5
    torch.testing.assert_close(corrected.log_probs[0].grad, expected, rtol=1e-4, atol=1e-7)
    log = runs.logs(corrected)[0]
    assert log["weights/importance/ratio/max"] == pytest.approx(ratio.max().item(), rel=1e-4)
    assert 0 < log["ess/mean"] < 1


def test_the_rewards_of_a_recipe_need_their_column(model_path, tmp_path):
    rows = tiny.prompts().rename_column("answer", "solution")
    with pytest.raises(TrimtabError, match="train_dataset: no column 'answer'"):
        runs.trainer(model_path, runs.arguments(tmp_path), reward_funcs=None, train_dataset=rows)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"generation_kwargs": {"temperature": 50.0}}, "generation_kwargs: temperature"),
        ({"generation_kwargs": {"num_beams": 3}}, "generation_kwargs: num_beams"),
        ({"per_device_train_batch_size": 8, "generation_batch_size": 32}, "generation_batch_size=32"),
    ],
)
def test_another_way_to_say_what_the_recipe_says_is_refused(tmp_path, changes, said):
    with pytest.raises(TrimtabError, match=said):
        runs.arguments(tmp_path, **changes)


def test_the_same_said_in_another_way_is_not(tmp_path):
    config = runs.arguments(tmp_path, generation_batch_size=16, scale_rewards=True)
    assert (config.generation_batch_size, config.scale_rewards) == (16, "group")
    with pytest.raises(TrimtabError, match="per_device_train_batch_size=8 contradicts"):
        sizes = "training={mini_batch_size: 16, micro_batch_size: 4, steps: 2}"
        runs.arguments(tmp_path, sizes, per_device_train_batch_size=8)
