"""Tools and environments under a recipe: the model's tokens train, the results' do not."""

import json
import math

import pytest
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

from tests.trl import runs

ONE_STEP = "training={mini_batch_size: 16, steps: 1}"
LONG = "rollout={engine: transformers, group_size: 4, prompts_per_step: 4, max_length: 400}"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string", "x-regex": r"^(.*?)(?:<call>|<\|im_end\|>|$)"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"<call>(.+?)</call>",
            "items": {"type": "object", "x-parser": "json"},
        },
    },
}


def chat_tokenizer():
    special = ["<pad>", "<|im_end|>", "<|im_start|>", "<call>", "</call>"]
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(special + characters)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tok = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
    )
    tok.add_tokens(["<call>", "</call>"])
    tok.chat_template, tok.response_schema = TEMPLATE, SCHEMA
    return tok


def chat_model(tok):
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(tok),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
        bos_token_id=None,
        max_position_embeddings=2048,
    )
    return Qwen3ForCausalLM(config)


class Calling(runs.Watching):
    """Says what a trained model would: every other row calls `add` first, and answers with a digit after the result."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        tok, turns = self.processing_class, []
        for row, ids in enumerate(prompt_ids):
            after_a_tool = "<|im_start|>tool" in tok.decode(ids)
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": row, "b": 1}}}
            calls = row % 2 == 0 and not after_a_tool
            text = f"well <call>{json.dumps(call)}</call>" if calls else str(row % 10)
            turns.append(tok(f"{text}<|im_end|>")["input_ids"])
        return turns, None


@pytest.fixture
def no_transform_is_used(monkeypatch):
    """TRL asks for jmespath with tools, which the schema above does without."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.is_jmespath_available", lambda: True)


def check_tool_tokens(run):
    """Rows that called: the result's tokens have no gradient, and the model's own before and after have."""
    inputs, gradient = run.seen[0], run.log_probs[0].grad
    own_tokens = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    foreign = inputs["completion_mask"].bool() & ~own_tokens
    called = foreign.any(dim=1)
    assert called.sum() == 8
    for row in called.nonzero().flatten().tolist():
        text = run.processing_class.decode(inputs["completion_ids"][row][foreign[row]])
        assert "<|im_start|>tool" in text
    assert gradient[~own_tokens].abs().max() == 0
    learning = own_tokens & (inputs["advantages"] != 0).unsqueeze(1)
    assert (learning & called.unsqueeze(1)).any()
    assert (gradient[learning] != 0).all()
    log = runs.logs(run)[0]
    assert log["tokens/count"] == own_tokens.sum()
    assert log["tools/call_frequency"] == 0.5
    assert log["tools/failure_frequency"] == 0
    assert log["grad_norm"] > 0


def conversations():
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i} and 1?"}]} for i in range(16)])


def test_results_of_tools_train_nothing(tmp_path, no_transform_is_used):
    called = []

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one number
            b: the other

        Returns:
            their sum
        """
        called.append((a, b))
        return a + b

    def reward(completions, **_):
        assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant"]
        assert completions[2][1]["content"] == "3"
        return [float(len(messages) + row % 4) for row, messages in enumerate(completions)]

    tok = chat_tokenizer()
    run = runs.trained(
        chat_model(tok),
        runs.arguments(tmp_path, ONE_STEP, LONG),
        kind=Calling,
        tools=[add],
        processing_class=tok,
        train_dataset=conversations(),
        reward_funcs=reward,
    )
    assert called == [(row, 1) for row in range(0, 16, 2)]
    check_tool_tokens(run)


class Counter:
    """An environment that brings its own prompts and rewards."""

    def reset(self, **_) -> str:
        self.total = 0
        return "count"

    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: one number
            b: the other

        Returns:
            the total so far
        """
        self.total += a + b
        return self.total

    def get_reward(self) -> float:
        return float(self.total)


def test_an_environment_owns_prompts_and_rewards(tmp_path, no_transform_is_used):
    """Neither a data set nor rewards are passed: the recipe's own must not step in."""
    tok = chat_tokenizer()
    run = runs.trained(
        chat_model(tok),
        runs.arguments(tmp_path, ONE_STEP, LONG, "advantage={name: group, scale: none}"),
        kind=Calling,
        environment_factory=Counter,
        processing_class=tok,
        train_dataset=None,
        reward_funcs=None,
    )
    rewards = [float(row + 1) if row % 2 == 0 else 0.0 for row in range(16)]
    assert list(run._logs["rewards"]) == ["Counter"]
    assert list(run._logs["rewards"]["Counter"]) == rewards
    groups = torch.tensor(rewards).view(4, 4)
    expected = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    torch.testing.assert_close(torch.tensor(run._logs["advantages"]), expected, rtol=0, atol=1e-4)
    assert math.isfinite(runs.logs(run)[0]["loss"])
    check_tool_tokens(run)
