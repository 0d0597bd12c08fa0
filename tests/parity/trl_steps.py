"""TRL's trainer and ours in the middle of the same step, in float64, on tensors that are made up."""

import torch
from trl import GRPOConfig, GRPOTrainer

from tests.trl import tiny
from trl_ext import TrimtabConfig, TrimtabGRPOTrainer

ACCUMULATION, WINDOWS, MAX_LENGTH = 2, 2, 6


def trl_trainer(model_path, folder, loss_type, **changes):
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "steps_per_generation": ACCUMULATION * WINDOWS,
        "loss_type": loss_type,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
    }
    config = GRPOConfig(**tiny.arguments(folder / "trl", **(options | changes)))
    return prepared(tiny.trainer(GRPOTrainer, model_path, config))


def our_trainer(model_path, folder, *overrides):
    sizes = [
        "rollout={engine: transformers, group_size: 4, prompts_per_step: 4, max_length: 6}",
        "training={mini_batch_size: 8, micro_batch_size: 4, steps: 10}",
    ]
    quiet = {"use_cpu": True, "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True}
    config = TrimtabConfig(str(folder / "ours"), recipe="quickstart", overrides=[*sizes, *overrides], **quiet)
    return prepared(tiny.trainer(TrimtabGRPOTrainer, model_path, config))


def prepared(trainer):
    """As in the middle of a step: in float64, training, with TRL's log-probs computed from plain logits."""
    trainer.model.double().train()
    trainer.current_gradient_accumulation_steps = ACCUMULATION

    def plain(model, input_ids, attention_mask, logits_to_keep, **_):
        hidden = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = model.lm_head(hidden)[:, -logits_to_keep - 1 : -1].log_softmax(-1)
        chosen = logits.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
        return chosen, -(logits.exp() * logits).sum(-1).detach(), None

    trainer._get_per_token_logps_and_entropies = plain
    return trainer


def micro_batch(*, lengths=(6, 3, 1, 5), seed=0):
    """Four rows of unequal lengths, whose old and reference policies are some way off."""
    generator = torch.Generator().manual_seed(seed)
    completion = torch.randint(2, 14, (4, MAX_LENGTH), generator=generator)
    mask = (torch.arange(MAX_LENGTH) < torch.tensor(lengths).unsqueeze(1)).long()
    noise = lambda: torch.randn(4, MAX_LENGTH, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "prompt_ids": torch.randint(2, 14, (4, 4), generator=generator),
        "prompt_mask": torch.ones(4, 4, dtype=torch.long),
        "completion_ids": completion,
        "completion_mask": mask,
        "advantages": torch.tensor([1.5, -0.5, -2.0, 0.7], dtype=torch.float64),
        "num_items_in_batch": torch.tensor(37),
        "noise": (noise() * 0.4, noise() * 0.4),
    }


def with_policies(trainer, inputs):
    """Old and reference log-probs at a fixed distance from the model's own: inside the clip range and outside it."""
    old_noise, ref_noise = inputs.pop("noise")
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        current, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, MAX_LENGTH)
    return inputs | {"old_per_token_logps": current + old_noise, "ref_per_token_logps": current + ref_noise}


def loss_and_gradient(trainer, inputs, *, scale=1.0):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs) * scale
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def trl_denominators(loss_type, inputs):
    """TRL's own: of the micro-batch times the accumulation, or of the generation batch scaled to one step."""
    generated = inputs["num_items_in_batch"] / WINDOWS
    tokens = {"bnpo": inputs["completion_mask"].sum() * ACCUMULATION, "dapo": generated, "cispo": generated}
    sequences = torch.tensor(4.0 * ACCUMULATION)
    return {"tokens": tokens.get(loss_type, torch.tensor(1.0)), "sequences": sequences}


def refuse(*_):
    raise AssertionError("TRL's loss must not run under a recipe")
