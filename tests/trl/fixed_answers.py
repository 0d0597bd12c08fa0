"""A run whose answers do not depend on the sampler, for any number of ranks: `fixed_answers.py MODEL FOLDER`."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.trl import tiny  # noqa: E402
from trl_ext import TrimtabConfig, TrimtabGRPOTrainer  # noqa: E402

model_path, folder = sys.argv[1], Path(sys.argv[2])
calls = 0


def answers(prompts, trainer):
    """Rows of unequal lengths, told by the row's place among those of all ranks and the number of the call."""
    global calls
    calls += 1
    first = trainer.accelerator.process_index * len(prompts)
    ids = []
    for row in range(first, first + len(prompts)):
        generator = torch.Generator().manual_seed(1000 * calls + row)
        length = 1 + int(torch.randint(0, 6, (), generator=generator))
        ids.append(torch.randint(2, 14, (length,), generator=generator).tolist())
    prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[0.0] * len(row) for row in ids]}


config = TrimtabConfig(
    str(folder),
    recipe="quickstart",
    overrides=[
        "rollout={engine: transformers, group_size: 4, prompts_per_step: 4, max_length: 6}",
        "training={mini_batch_size: 16, micro_batch_size: 4, steps: 3}",
        "optimizer={name: adamw, lr: 1.0e-2}",
    ],
    use_cpu=True,
    report_to="none",
    gradient_checkpointing=False,
    disable_tqdm=True,
    save_strategy="no",
    ddp_find_unused_parameters=False,
)
run = tiny.trainer(TrimtabGRPOTrainer, model_path, config, rollout_func=answers)
run.train()
if run.accelerator.is_main_process:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tiny.flat_weights(run.accelerator.unwrap_model(run.model)), folder / "weights.pt")
