"""The rows of the contract table: every core that gives a value per token, and what it reads."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trimtab.correction import BOUNDS, importance_weights, rejection_mask
from trimtab.kl import ESTIMATORS, kl_penalty
from trimtab.policy_loss import cispo, gspo, gspo_token, minpro, ppo_clip, sapo
from trimtab.ratios import LEVELS, log_weight

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Core:
    """A row of the table."""

    name: str
    function: Callable[..., Any]
    reads: tuple[str, ...]
    """Words of the batch, in the order of its positional arguments; the mask comes after them."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Words of the batch that it takes by keyword."""
    gradient: tuple[str, ...] = ("log_prob",)
    """The words that a gradient reaches; it reaches no other."""
    surrogate: bool = False
    keeps: bool = False
    """It answers yes or no, so that neither a dtype nor a small change shows in its value."""
    pull: Callable[[float, float], float] | None = None
    """Sign of the gradient of `log_prob` after a drift of it by so many nats, where the advantage has that sign."""

    @property
    def words(self) -> tuple[str, ...]:
        return self.reads + self.options

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        optional = {word: batch[word] for word in self.options}
        result = self.function(*(batch[word] for word in self.reads), batch["response_mask"], **self.keys, **optional)
        return result if isinstance(result, tuple) else (result, {})

    def argument(self, word: str) -> str:
        """What the core itself calls the word."""
        return dict(zip(self.reads, inspect.signature(self.function).parameters, strict=False)).get(word, word)


def clip_pull(drift: float, advantage: float) -> float:
    return -advantage if drift * advantage < 0 else 0.0  # pulled back, or stopped by the clip


def weight_pull(_: float, advantage: float) -> float:
    return -advantage  # the weight is bounded, and no bound stops the gradient


def gate_pull(drift: float, advantage: float) -> float:
    return -advantage if drift < 0 else 0.0  # far above 1 the gate is saturated: nothing pulls back


SURROGATE = ("log_prob", "old_log_prob", "advantages")
REJECTION_BOUNDS = {
    "token_ratio": {"low": 0.8, "high": 1.3},
    "sequence_product": {"low": 0.8, "high": 1.3},
    "sequence_geometric": {"low": 0.95, "high": 1.1},
    "sequence_max_k2": {"high": 0.04},
    "sequence_mean_k3": {"high": 0.01},
}
CORES = [
    Core("ppo_clip", ppo_clip, SURROGATE, {"clip_low": 0.2, "clip_high": 0.28}, surrogate=True, pull=clip_pull),
    Core("ppo_clip-dual", ppo_clip, SURROGATE, {"clip_high": 0.28, "dual_clip": 3.0}, surrogate=True),
    Core("gspo", gspo, SURROGATE, {"clip_low": 0.1, "clip_high": 0.15}, surrogate=True, pull=clip_pull),
    Core("gspo_token", gspo_token, SURROGATE, {"clip_low": 0.1, "clip_high": 0.15}, surrogate=True, pull=clip_pull),
    Core("cispo", cispo, SURROGATE, {"cap": 1.2, "floor": 0.7}, surrogate=True, pull=weight_pull),
    Core("minpro", minpro, SURROGATE, {"cap": 1.1, "floor": 0.6}, surrogate=True, pull=weight_pull),
    Core("sapo", sapo, SURROGATE, {"tau_positive": 1.0, "tau_negative": 1.4}, surrogate=True, pull=gate_pull),
    *(
        Core(
            f"kl-{estimator}",
            kl_penalty,
            ("log_prob", "ref_log_prob"),
            {"estimator": estimator},
            options=("old_log_prob",) if estimator == "unbiased" else (),
            pull=lambda drift, _, k1=estimator == "k1": 1.0 if k1 else drift,
        )
        for estimator in ESTIMATORS
    ),
    *(
        Core(
            f"importance-{level}-{bound}",
            importance_weights,
            ("old_log_prob", "rollout_log_prob"),
            {"level": level, "bound": bound, "low": 0.7, "high": 1.2},
            gradient=(),
        )
        for level in LEVELS
        for bound in BOUNDS
    ),
    *(
        Core(
            f"rejection-{statistic}",
            rejection_mask,
            ("old_log_prob", "rollout_log_prob"),
            {"statistic": statistic, "veto": 0.72, **bounds},
            gradient=(),
            keeps=True,
        )
        for statistic, bounds in REJECTION_BOUNDS.items()
    ),
    *(
        Core(
            f"log_weight-{level}",
            log_weight,
            ("log_prob", "old_log_prob"),
            {"level": level},
            gradient=("log_prob", "old_log_prob"),
            pull=lambda *_: 1.0,
        )
        for level in LEVELS
    ),
]
REPORTING = [core for core in CORES if core.function not in (kl_penalty, log_weight)]
