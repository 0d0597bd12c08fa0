"""A model of a few thousand parameters and a task of one character, so that a TRL run takes a second."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM, set_seed

CHARACTERS = "0123456789+="


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i for i, c in enumerate(CHARACTERS, start=2)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def save_model(folder: Path, *, seed: int = 0) -> str:
    """An untrained model with a spread of answers; returns its folder."""
    tok = tokenizer()
    set_seed(seed)
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
        max_position_embeddings=64,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # an answer ends early often enough for lengths to differ
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return str(folder)


def prompts(count: int = 64) -> Dataset:
    return Dataset.from_list([{"prompt": f"{i % 10}+{i // 10 % 10}=", "answer": str(i % 10)} for i in range(count)])


def digit_reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Dense enough that groups differ: how often the answer occurs, less a little for the length."""
    return [text.count(digit) - 0.1 * len(text) for text, digit in zip(completions, answer, strict=True)]


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a small and silent run on the CPU."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 10,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    } | changes


def trainer(kind: type, model: Any, config: Any, **changes: Any) -> Any:
    """A trainer that prints nothing."""
    options = {"reward_funcs": digit_reward, "train_dataset": prompts()} | changes
    result = kind(model=model, args=config, **options)
    result.remove_callback(PrinterCallback)
    return result


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
