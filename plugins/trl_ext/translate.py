"""Where each value of a recipe acts in TRL."""

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.recipe import Recipe

SCALES = {"group_std": "group", "batch_std": "batch", "none": "none"}

ARGUMENTS: Mapping[str, tuple[str, Callable[[Recipe], Any]]] = {
    "num_generations": ("rollout.group_size", lambda r: r.rollout.group_size),
    "max_completion_length": ("rollout.max_length", lambda r: r.rollout.max_length),
    "temperature": ("rollout.temperature", lambda r: r.rollout.temperature),
    "top_p": ("rollout.top_p", lambda r: r.rollout.top_p),
    "use_vllm": ("rollout.engine", lambda r: r.rollout.engine == "vllm"),
    "num_iterations": ("training.epochs_per_rollout", lambda r: r.training.epochs_per_rollout),
    "max_steps": ("training.steps", lambda r: r.training.steps * r.updates_per_step),
    "seed": ("training.seed", lambda r: r.training.seed),
    "learning_rate": ("optimizer.lr", lambda r: r.optimizer.lr),
    "weight_decay": ("optimizer.weight_decay", lambda r: r.optimizer.weight_decay),
    "warmup_steps": ("optimizer.warmup_steps", lambda r: r.optimizer.warmup_steps * r.updates_per_step),
    "max_grad_norm": ("optimizer.max_grad_norm", lambda r: r.optimizer.max_grad_norm),
    "adam_beta1": ("optimizer.betas", lambda r: r.optimizer.betas[0]),
    "adam_beta2": ("optimizer.betas", lambda r: r.optimizer.betas[1]),
    "adam_epsilon": ("optimizer.eps", lambda r: r.optimizer.eps),
    "optim": ("optimizer.name", lambda r: {"adamw": "adamw_torch"}[r.optimizer.name]),
    "lr_scheduler_type": ("optimizer", lambda r: "constant_with_warmup"),
    "scale_rewards": ("advantage.scale", lambda r: SCALES[r.advantage.scale]),
    "beta": ("objective.penalties", lambda r: reference_coefficient(r)),
    "bf16": ("precision.train", lambda r: r.precision.train == "bf16"),
    "fp16": ("precision.train", lambda r: r.precision.train == "fp16"),
    "cast_lm_head_to_fp32": ("precision.lm_head", lambda r: casts_lm_head(r)),
    "vllm_importance_sampling_correction": ("objective", lambda r: r.rollout.engine == "vllm"),
}
"""TRL's arguments that a recipe states: the key it comes from, and its value."""

REPLACED = (
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "use_bias_correction_kl",
    "off_policy_mask_threshold",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "multi_objective_aggregation",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)
"""TRL's arguments that act only inside the loss or the advantage that the recipe's take the place of."""

RIVALS: Mapping[str, str] = {
    "num_train_epochs": "training.steps",
    "warmup_ratio": "optimizer.warmup_steps",
    "generation_batch_size": "rollout.prompts_per_step",
}
"""TRL's other arguments for what a recipe states: beside it they would do nothing, win over it, or break."""

SAMPLED = ("do_sample", "max_length", "max_new_tokens", "num_beams", "num_return_sequences")
"""Keys of `generation_kwargs`, besides those above, that would change what a recipe says of its rollout."""

ELSEWHERE: Mapping[str, str] = {
    "model": "the model of `trimtab run`; in a script, the trainer's `model`",
    "data": "the data of `trimtab run`; in a script, `train_dataset` where none is passed",
    "reward": "`reward_funcs` and `reward_weights` where none are passed",
    "advantage": "in place of TRL's advantages",
    "objective": "in place of TRL's loss",
    "rollout.prompts_per_step": "steps_per_generation",
    "training.mini_batch_size": "gradient_accumulation_steps",
    "training.micro_batch_size": "per_device_train_batch_size",
    "training.checkpoint_every": "save_steps of `trimtab run`",
    "training.shuffle_rewards": "the trainer, once the rewards are known",
    "precision.rollout": "checked against vLLM's; idle where the training model itself samples",
    "precision.kv_cache": "auto, which is all there is",
    "moe.routing_replay": "none, which is all there is",
    "schedules": "empty, which is all there is",
    "sampling.curriculum": "null, which is all there is",
    "sampling.dynamic": "pending",
}
"""The values that no argument of TRL takes, and what does."""


def reference_coefficient(recipe: Recipe) -> float:
    """TRL's `beta`: with it TRL computes the reference log-probs; its own KL term is replaced."""
    return float(sum(use.coefficient for use in recipe.objective.penalties if use.name == "kl"))


def casts_lm_head(recipe: Recipe) -> bool:
    """Whether the head must be cast: in fp32 training it is there already."""
    return recipe.precision.lm_head == "fp32" and recipe.precision.train != "fp32"


def batch_arguments(recipe: Recipe, *, world_size: int, per_device: int | None) -> dict[str, int]:
    """TRL's batch sizes from the recipe's, for a number of processes.

    Args:
        recipe: the recipe.
        world_size: processes that train.
        per_device: rows of one forward on one process, where the user said so.

    Returns:
        per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation.

    Raises:
        TrimtabError: the sizes do not divide.
    """
    mini = recipe.training.mini_batch_size
    rows = per_device or recipe.training.micro_batch_size or mini // world_size
    if rows == 0 or mini % (rows * world_size):
        raise TrimtabError(
            f"training.mini_batch_size: {mini} must be a multiple of the rows that {world_size} processes take at "
            f"once, {world_size} x {rows}; set training.micro_batch_size"
        )
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": mini // (rows * world_size),
        "steps_per_generation": recipe.rows_per_step // (rows * world_size),
    }
