"""`TrimtabGRPOTrainer`: TRL's trainer with the loss and the advantages of a recipe."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig
from trl.models.utils import disable_gradient_checkpointing

from trimtab.advantages import group_advantages
from trimtab.diagnostics import mismatch_metrics
from trimtab.errors import TrimtabError
from trimtab.metrics import Metrics, combine, mean_metric, spread_metrics
from trimtab.objective import Objective
from trimtab.ratios import log_ratio
from trl_ext.batch import MODEL_INPUTS, to_batch
from trl_ext.config import TrimtabConfig
from trl_ext.data import check_columns, check_enough, drop_long_prompts, load_prompts
from trl_ext.resume import ResumableGRPOTrainer
from trl_ext.rewards import accuracy_function, reward_functions
from trl_ext.sampler import recorded_log_probs
from trl_ext.settings import describe


class TrimtabGRPOTrainer(ResumableGRPOTrainer):
    r"""TRL's `GRPOTrainer` whose loss and advantages are those of a recipe.

    .. math:: L = \sum_{\text{micro-batches, ranks}} \texttt{Objective}(\text{batch}, \text{totals of the step})

    With a plain `GRPOConfig` it is `GRPOTrainer`, bit for bit, but for a resume in the middle of a generation window,
    which continues with the window's own answers. With a `TrimtabConfig` that names a recipe, `trimtab.objective`
    computes the loss. Generation, rewards, logging, evaluation, PEFT, tools, environments and vision stay TRL's.

    Paper: that of the recipe. Differs from TRL: denominators are those of the whole optimizer step, however it is
    split; a row without a trainable token is not counted.

    Args:
        model: as for `GRPOTrainer`.
        reward_funcs: as for `GRPOTrainer`. None: the rewards of the recipe.
        args: a `TrimtabConfig` with a recipe, or a `GRPOConfig`.
        train_dataset: as for `GRPOTrainer`. None: the data of the recipe.
        **kwargs: every other argument of `GRPOTrainer`.

    Raises:
        TrimtabError: a recipe whose rewards or data cannot be had.

    Example:
        >>> TrimtabGRPOTrainer(  # doctest: +SKIP
        ...     "Qwen/Qwen3-0.6B", args=TrimtabConfig("out", recipe="dapo", overrides=["rollout.group_size=8"])
        ... ).train()
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        self.recipe = args.load_recipe() if isinstance(args, TrimtabConfig) and args.recipe is not None else None
        self.objective = Objective.from_recipe(self.recipe) if self.recipe is not None else None
        own_rewards = reward_funcs is not None or kwargs.get("environment_factory") is not None
        own_data = train_dataset is not None or kwargs.get("environment_factory") is not None
        if self.recipe is not None and not own_rewards:
            reward_funcs, weights = reward_functions(self.recipe)
            args.reward_weights = args.reward_weights or weights
        if self.recipe is not None and not own_data:
            train_dataset = load_prompts(self.recipe.data.train, self.recipe.data)
        self._parts: dict[str, list[Metrics]] = defaultdict(list)
        self._totals: dict[str, Tensor] | None = None
        super().__init__(model, reward_funcs, args, train_dataset, *more, **kwargs)
        if self.recipe is not None and not own_data:
            longest = self.recipe.data.max_prompt_length
            self.train_dataset = drop_long_prompts(self.train_dataset, self.processing_class, longest)
        if self.recipe is not None:
            graded = not own_rewards and accuracy_function(self.recipe) is not None
            check_columns(self.train_dataset, ("answer",) if graded else ())
            check_enough(self.train_dataset, self.recipe.rollout.prompts_per_step)
            self._check_can_act()
        if self.recipe is not None and self.accelerator.is_main_process:
            print(describe(self.recipe, self.args, own_rewards=own_rewards, own_data=own_data), flush=True)

    def _check_can_act(self) -> None:
        if self.args.fp16 and self.accelerator.device.type == "cpu":
            raise TrimtabError("precision.train: fp16 does not act on a CPU, where autocast ignores it; bf16 or fp32")
        reader = self.objective.reads.get("rollout_log_prob")
        if reader and self.use_transformers_continuous_batching and self.rollout_func is None:
            raise TrimtabError(
                f"objective: {reader} corrects by the sampler's log-probs, rollout_log_prob, which TRL's continuous "
                "batching does not return; leave use_transformers_continuous_batching off, or use vLLM"
            )

    # Rollout

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[float]] | None]:
        if self.objective is None or self.use_vllm or self.use_transformers_continuous_batching:
            return super()._generate_single_turn(*args, **kwargs)
        with recorded_log_probs() as recorder:
            completion_ids, _ = super()._generate_single_turn(*args, **kwargs)
        return completion_ids, recorder.of(completion_ids)

    # Rewards and advantages

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self.objective is not None and self.recipe.training.shuffle_rewards and self.model.training:
            rewards = self._shuffled(rewards)
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.objective is not None:
            self._add_old_log_probs(output)
            advantages = self._group_advantages()
            start = self.accelerator.process_index * len(inputs)
            output["advantages"] = advantages[start : start + len(inputs)]
            logged = self._logs["advantages"]  # TRL has put its own there
            for _ in range(min(len(advantages), len(logged))):
                logged.pop()
            logged.extend(advantages.tolist())
        return output

    @torch.no_grad()
    def _add_old_log_probs(self, output: dict[str, Any]) -> None:
        """TRL leaves the old log-probs out where no update lies between; a correction still compares them."""
        if "old_per_token_logps" in output or not self.objective.corrects:
            return
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            output["old_per_token_logps"], _, _ = self._log_probs(self.model, output)

    def _group_advantages(self) -> Tensor:
        """The recipe's advantages of every answer of all processes."""
        total = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        total = torch.where(self._rewards.isnan().all(dim=1), torch.nan, total)
        size = self.num_generations if self.model.training else self.num_generations_eval
        groups = torch.arange(len(total), device=total.device) // size
        node = self.recipe.advantage
        return group_advantages(total, groups, baseline=node.baseline, scale=node.scale, eps=node.eps)

    def _shuffled(self, rewards: Tensor) -> Tensor:
        """Each group's rewards in another order, the same on all processes: nothing is left to learn."""
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self._step)
        groups = rewards.view(-1, self.num_generations, rewards.size(1))
        order = torch.rand(groups.shape[:2], generator=generator).argsort(dim=1).to(rewards.device)
        return groups.gather(1, order.unsqueeze(2).expand_as(groups)).reshape(rewards.shape)

    # Loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.objective is None:
            return super()._compute_loss(model, inputs)
        options = {"compute_entropy": True, "compute_aux_loss": self.aux_loss_enabled}
        log_prob, entropy, aux_loss = self._log_probs(model, inputs, **options)
        training = self.model.training
        batch = to_batch(inputs, log_prob)
        loss, metrics = self.objective(batch, self._step_totals() if training else None)
        metrics |= mean_metric("entropy", entropy, batch["response_mask"]) | self._mismatch(batch)
        if training:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over the processes
            metrics |= self._on_policy_gap(batch)
        if self.aux_loss_enabled:
            steps = self.current_gradient_accumulation_steps if training else 1
            loss = loss + self.router_aux_loss_coef * aux_loss / steps
            metrics |= {"aux_loss/mean": aux_loss.detach(), "aux_loss/count": torch.ones_like(aux_loss)}
        self._parts["train" if training else "eval"].append(metrics)
        return loss

    def _log_probs(self, model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            batch_size=self.args.per_device_train_batch_size,
            **{name: inputs.get(name) for name in MODEL_INPUTS},
            **options,
        )

    def _step_totals(self) -> dict[str, Tensor]:
        """The sums over the micro-batches and processes of the optimizer step that the current one belongs to."""
        size = self.args.gradient_accumulation_steps
        position = self._step % self.args.steps_per_generation
        if position % size == 0 or self._totals is None:
            first = position - position % size
            window = self._buffered_inputs[first : first + size]
            sums = [self.objective.totals(to_batch(inputs)) for inputs in window]
            local = torch.stack([torch.stack(list(part.values())) for part in sums]).sum(dim=0)
            self._totals = dict(zip(sums[0], self.accelerator.reduce(local, reduction="sum"), strict=True))
        return self._totals

    # Metrics

    def _mismatch(self, batch: dict[str, Tensor]) -> Metrics:
        """How far the sampler is from the trainer, where the sampler returned its log-probs."""
        if "rollout_log_prob" not in batch:
            return {}
        found = mismatch_metrics(batch["old_log_prob"], batch["rollout_log_prob"], batch["response_mask"])
        return {f"mismatch/{name}": value for name, value in found.items()}

    def _on_policy_gap(self, batch: dict[str, Tensor]) -> Metrics:
        """|log current/old| on the first update of a rollout, where the policies are the same: 0 but for rounding."""
        window = self.args.steps_per_generation * self.num_iterations
        if self._step % window >= self.args.gradient_accumulation_steps:
            return {}
        gap = log_ratio(batch["log_prob"].detach(), batch["old_log_prob"], batch["response_mask"]).abs()
        return spread_metrics("on_policy_gap", gap, batch["response_mask"])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        if parts := self._parts.pop(mode, []):
            for name, value in self._over_processes(combine(parts)).items():
                self._metrics[mode][name] = [value]
        super().log(logs, start_time)

    def _over_processes(self, metrics: Metrics) -> dict[str, float]:
        names = sorted(metrics)
        local = torch.stack([metrics[name].double() for name in names]).unsqueeze(0)
        rows = self.accelerator.gather(local)
        whole = combine(dict(zip(names, row, strict=True)) for row in rows)
        return {name: value.item() for name, value in whole.items()}

    def extra_state(self) -> dict[str, Any]:
        return {"metrics": self._parts["train"]}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._parts["train"] = state["metrics"]
