"""The embedded model: a small Qwen3, taught the task with a fault that reinforcement learning can remove."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trimtab.cli.embedded import task
from trimtab.cli.embedded.tokenizer import build_tokenizer

WARM_START_STEPS = 900
BATCH_SIZE = 128
LEARNING_RATE = 3e-3
FAULT_RATE = 0.78  # share of labels without the carry: greedy decoding is mostly wrong, sampling often right
PROMPT_LENGTH = 6


def build_model(folder: Path, *, seed: int, steps: int = WARM_START_STEPS) -> None:
    """Warm-start the model and save it with its tokenizer as a Hugging Face checkpoint.

    It runs on one thread, which is fastest at this size and gives the same weights for the same seed. The state of
    the random generators and the number of threads are left as they were.

    Args:
        folder: where the checkpoint goes.
        seed: decides the initial weights, the batches and which labels are faulty.
        steps: supervised optimizer steps.

    Example:
        >>> build_model(Path("model"), seed=0)  # doctest: +SKIP
    """
    tokenizer = build_tokenizer()
    with _one_thread(), torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed the accelerators.
        torch.default_generator.manual_seed(seed)
        model = Qwen3ForCausalLM(_config(tokenizer))
        _warm_start(model, tokenizer, seed=seed, steps=steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # not 64 / 4: vLLM on a CPU takes 32 or 64; and the warm start then succeeds for every seed tried
        intermediate_size=256,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    pairs, _ = task.split_pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * max(0.05, 1 - step / steps)
    )
    model.train()
    for _ in range(steps):
        texts = [_labelled(*rng.choice(pairs), rng) + "<eos>" for _ in range(BATCH_SIZE)]
        tokens = torch.tensor(tokenizer(texts)["input_ids"])
        logits = model(tokens).logits[:, PROMPT_LENGTH - 1 : -1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, PROMPT_LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def _labelled(a: int, b: int, rng: random.Random) -> str:
    label = task.faulty_answer if rng.random() < FAULT_RATE else task.answer
    return task.prompt(a, b) + label(a, b)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
