"""Where a framework's own default or meaning is another than a recipe's value: what `trimtab show` prints beside it."""

from collections.abc import Mapping

OTHERS: Mapping[str, Mapping[str, str]] = {
    "objective.surrogate.clip_low": {"TRL": "0.2 (epsilon)", "veRL": "0.2 (clip_ratio_low)"},
    "objective.surrogate.clip_high": {"TRL": "0.2 (epsilon_high unset)", "veRL": "0.2 (clip_ratio_high)"},
    "objective.surrogate.dual_clip": {"TRL": "none (delta)", "veRL": "3.0 (clip_ratio_c), always on"},
    "objective.aggregation.mode": {
        "TRL": "token-mean (loss_type dapo), over the generation batch",
        "veRL": "token-mean, over the mini-batch",
    },
    "objective.penalties": {"TRL": "none (beta 0)", "veRL": "none (use_kl_loss false)"},
    "objective.old_log_prob": {
        "TRL": "recompute, or the current ones where no update lies between",
        "veRL": "recompute ('decoupled')",
    },
    "advantage.scale": {"TRL": "group_std (scale_rewards)", "veRL": "group_std (norm_adv_by_std_in_grpo)"},
    "advantage.eps": {"TRL": "0.0001, not settable", "veRL": "0.000001, not settable"},
    "rollout.group_size": {"TRL": "8 (num_generations)", "veRL": "1 (rollout.n)"},
    "rollout.temperature": {"TRL": "1.0", "veRL": "1.0"},
    "rollout.top_p": {"TRL": "1.0", "veRL": "1"},
    "training.mini_batch_size": {
        "TRL": "processes x per_device_train_batch_size x gradient_accumulation_steps, in answers",
        "veRL": "256 (ppo_mini_batch_size), in prompts",
    },
    "training.steps": {"TRL": "max_steps counts updates", "veRL": "total_training_steps counts rollouts"},
    "optimizer.lr": {"TRL": "0.000001", "veRL": "0.000001"},
    "optimizer.weight_decay": {"TRL": "0.0", "veRL": "0.01"},
    "optimizer.warmup_steps": {"TRL": "0, in updates", "veRL": "-1 (from a ratio of 0), in rollouts"},
    "precision.train": {"TRL": "bf16", "veRL": "bf16, with fp32 weights"},
}
