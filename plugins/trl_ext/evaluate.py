"""Held-out accuracy: greedy answers, graded by the recipe's own reward."""

from typing import Any

import torch
from datasets import Dataset
from trl.data_utils import maybe_apply_chat_template

from trl_ext.rewards import RewardFunction


@torch.no_grad()
def greedy_accuracy(trainer: Any, rows: Dataset, grade: RewardFunction, *, batch_size: int) -> float:
    """Share of the rows whose greedy answer the reward calls right. Leaves the random state alone.

    Args:
        trainer: a TRL trainer, for its model, tokenizer and length limit.
        rows: held-out `prompt` and `answer`.
        grade: 1.0 for a right answer.
        batch_size: rows of one generation.
    """
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer._tokenizer
    was_training = model.training
    model.eval()
    right = 0.0
    for start in range(0, len(rows), batch_size):
        part = rows.select(range(start, min(start + batch_size, len(rows))))
        prompts = [maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"] for prompt in part["prompt"]]
        encoded = tokenizer(
            prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
        )
        output = model.generate(
            **encoded.to(model.device),
            max_new_tokens=trainer.max_completion_length,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=trainer.eos_token_ids,
        )
        answers = output[:, encoded["input_ids"].size(1) :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        right += sum(grade(completions=texts, answer=list(part["answer"])))
    model.train(was_training)
    return right / len(rows)
