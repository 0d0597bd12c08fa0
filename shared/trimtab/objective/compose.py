"""`Objective`: the loss of a recipe, and the sums that it needs of the whole optimizer step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.aggregation import aggregate, check_mode
from trimtab.correction import weight_total
from trimtab.diagnostics import effective_share
from trimtab.kl import k3_estimate
from trimtab.masking import masked_sum
from trimtab.metrics import Metrics, mean_metric, token_counts
from trimtab.objective.checks import check_batch, check_bypass, check_counts, check_whole_rows
from trimtab.objective.places import MASKS, PENALTIES, SURROGATES, WEIGHTS
from trimtab.objective.use import Use, read_uses
from trimtab.ratios import log_ratio
from trimtab.tensors import bool_mask, live_tokens

Batch = Mapping[str, Tensor]
Totals = Mapping[str, Tensor]

ANCHORS = ("recompute", "bypass")
DENOMINATORS = ("original", "kept")


class Objective:
    r"""The whole policy loss, composed from its five places.

    .. math:: L = \mathrm{agg}\Bigl(s \prod_k w_k \prod_l m_l\Bigr) + \sum_p c_p\, \mathrm{agg}(p)

    with the surrogate s, weights w, masks m and penalties p. Penalties act on every trainable token, dropped or not,
    and over the original denominator.

    Paper: none, the decomposition is ours. Differs: denominators are those of the whole optimizer step.

    Args:
        surrogate: `{"name": ..., key: value}`, one of `trimtab.objective.SURROGATES`.
        weights: any number of `trimtab.objective.WEIGHTS`; they are multiplied.
        masks: any number of `trimtab.objective.MASKS`; a token stays if all keep it.
        penalties: any number of `trimtab.objective.PENALTIES`, each with a `coefficient`.
        aggregation: `{"mode": ..., "max_length": ..., "denominator": "original" | "kept"}`.
        old_log_prob: recompute | bypass; with bypass the rollout log-probs stand in for the old ones.

    Raises:
        ValueError: an unknown name, key or mode, or a ratio that would be counted twice.

    Example:
        >>> objective = Objective(surrogate={"name": "ppo_clip"}, aggregation={"mode": "token-mean"})
        >>> batch = {"log_prob": torch.zeros(1, 2), "old_log_prob": torch.zeros(1, 2),
        ...          "advantages": torch.tensor([2.0]), "response_mask": torch.tensor([[1, 0]])}
        >>> objective(batch)[0]
        tensor(-2.)
    """

    def __init__(
        self,
        *,
        surrogate: Mapping[str, Any],
        weights: Sequence[Mapping[str, Any]] = (),
        masks: Sequence[Mapping[str, Any]] = (),
        penalties: Sequence[Mapping[str, Any]] = (),
        aggregation: Mapping[str, Any],
        old_log_prob: str = "recompute",
    ) -> None:
        self.bypass = _one_of("old_log_prob", old_log_prob, ANCHORS) == "bypass"
        (self.surrogate,) = read_uses(SURROGATES, [surrogate])
        self.weights = read_uses(WEIGHTS, weights)
        self.normalized = [use for use in self.weights if use.values.get("normalize")]
        self.masks = read_uses(MASKS, masks)
        self.penalties = read_uses(PENALTIES, penalties)
        options = dict(aggregation)
        self.denominator = _one_of("aggregation.denominator", options.pop("denominator", "original"), DENOMINATORS)
        self.mode = str(options.pop("mode", None))
        self.max_length = options.pop("max_length", None)
        if options:
            raise ValueError(f"aggregation: unknown {sorted(options)}; allowed: mode, max_length, denominator")
        check_mode(self.mode, self.max_length)
        if self.mode not in self.surrogate.term.modes:
            raise ValueError(
                f"aggregation.mode: {self.mode} would weigh answers by their lengths, since the ratio of "
                f"{self.surrogate} is the whole answer's; allowed: {', '.join(self.surrogate.term.modes)}"
            )
        if self.surrogate.term.whole_row and self.denominator == "kept":
            check_whole_rows(str(self.surrogate), ((str(use), use.values) for use in self.masks))
        if self.bypass:
            check_bypass((str(use), use.term.reads) for use in self.masks)
        check_counts(((str(use), use.term.counts) for use in (self.surrogate, *self.weights)), bypass=self.bypass)

    @classmethod
    def from_recipe(cls, recipe: Any) -> "Objective":
        """The objective of a recipe, or of a mapping laid out like one."""
        node = recipe["objective"] if isinstance(recipe, Mapping) else recipe.objective
        return cls(**(node if isinstance(node, Mapping) else node.model_dump()))

    @property
    def reads(self) -> dict[str, str]:
        """The words that a batch must hold, each with the method that reads it."""
        return self._words([self.surrogate, *self.weights, *self.masks, *self.penalties])

    @property
    def corrects(self) -> bool:
        """Whether a weight or a mask compares policies, so that the old log-probs must be there before the loss."""
        return "old_log_prob" in self._words([*self.weights, *self.masks])

    @torch.no_grad()
    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Sums of this batch that the whole optimizer step needs; they add up over micro-batches and ranks.

        Args:
            batch: the `response_mask`, and what the weights and masks read.

        Returns:
            Denominators and sums of the weights, as 0-dim float64 tensors.

        Raises:
            ValueError: a word is missing, or a shape differs.
        """
        check_batch(batch, self._words([*self.weights, *self.masks]))
        batch = self._anchored(batch)
        mask = bool_mask(batch["response_mask"])
        weight, kept, _ = self._factor(batch, {})
        result = {"tokens": mask.sum(), "sequences": mask.any(dim=1).sum()}
        result |= {"kept_tokens": kept.sum(), "kept_sequences": kept.any(dim=1).sum()}
        result |= {"weight": masked_sum(weight, mask), "weight_square": masked_sum(weight.square(), mask)}
        for use in self.normalized:
            plain, _ = use(batch, normalize=False)
            result[f"{use}/total"], result[f"{use}/count"] = weight_total(plain, mask, level=use.values["level"])
        return {name: value.double() for name, value in result.items()}

    def __call__(self, batch: Batch, totals: Totals | None = None) -> tuple[Tensor, Metrics]:
        """This batch's share of the step's loss.

        Args:
            batch: tensors by word: `log_prob` (B, T) with its gradient; `old_log_prob`, `rollout_log_prob`,
                `ref_log_prob` (B, T) where the recipe reads them; `advantages` (B,) or (B, T); `response_mask` (B, T).
            totals: the sums over all micro-batches and ranks of the optimizer step. Default: the batch is the whole
                step. Where gradients are averaged over ranks, multiply the loss by their number.

        Returns:
            loss: 0-dim; the shares of a step add up to the step's loss. metrics: detached; see
            `trimtab.metrics.combine`.

        Raises:
            ValueError: a word is missing, or a shape differs.
        """
        check_batch(batch, self.reads)
        totals = self.totals(batch) if totals is None else totals
        if "tokens" not in totals:
            raise ValueError("totals: not the sums of `Objective.totals`; pass None where the batch is the whole step")
        batch = self._anchored(batch)
        mask = bool_mask(batch["response_mask"])
        weight, kept, metrics = self._factor(batch, totals)
        per_token, found = self.surrogate(batch)
        metrics |= {f"surrogate/{name}": value for name, value in found.items()}
        metrics |= self._common_metrics(batch, totals)
        per_token = torch.where(kept, per_token * weight, 0.0)
        loss = self._aggregate(per_token, kept if self.denominator == "kept" else mask, totals, self.denominator)
        for use in self.penalties:
            value = use(batch)
            metrics |= mean_metric(str(use), value, mask)
            loss = loss + use.coefficient * self._aggregate(value, mask, totals, "original")
        return loss, metrics

    def _words(self, uses: Sequence[Use]) -> dict[str, str]:
        words = {"response_mask": "every method"}
        for use in uses:
            for word in use.term.reads:
                anchored = "rollout_log_prob" if self.bypass and word == "old_log_prob" else word
                words.setdefault(anchored, str(use))
        return words

    def _anchored(self, batch: Batch) -> Batch:
        """The batch as the methods see it: with bypass, the rollout policy is the old one."""
        return {**batch, "old_log_prob": batch["rollout_log_prob"]} if self.bypass else batch

    def _factor(self, batch: Batch, totals: Totals) -> tuple[Tensor, Tensor, Metrics]:
        """Product of the weights, the tokens that the masks and weights keep, and what they report."""
        kept = bool_mask(batch["response_mask"])
        weight = torch.ones(kept.shape, device=kept.device)
        metrics: Metrics = {}
        for use in self.weights:
            if use not in self.normalized:
                value, found = use(batch)
            elif totals:
                value, found = use(batch, mean=totals[f"{use}/total"] / totals[f"{use}/count"].clamp(min=1))
            else:  # on the way to the totals, and no mean over a part of the step may enter them
                value, found = use(batch, normalize=False)
            weight = weight * value
            kept = kept & (value > 0)
            metrics |= {f"{use}/{name}": metric for name, metric in found.items()}
        for use in self.masks:
            value, found = use(batch)
            kept = kept & value
            metrics |= {f"{use}/{name}": metric for name, metric in found.items()}
        return weight, kept, metrics

    def _aggregate(self, per_token: Tensor, mask: Tensor, totals: Totals, denominator: str) -> Tensor:
        prefix = "kept_" if denominator == "kept" else ""
        return aggregate(
            per_token,
            mask,
            mode=self.mode,
            num_tokens=totals[f"{prefix}tokens"],
            num_sequences=totals[f"{prefix}sequences"],
            max_length=self.max_length,
        )

    def _common_metrics(self, batch: Batch, totals: Totals) -> Metrics:
        mask, log_prob, old = batch["response_mask"], batch["log_prob"].detach(), batch.get("old_log_prob")
        read = [batch[word] for word in self.reads if word.endswith("log_prob")]
        metrics = token_counts(mask, live_tokens(mask, *read))
        if old is not None:
            live = live_tokens(mask, log_prob, old)
            metrics |= mean_metric("kl", k3_estimate(log_ratio(log_prob, old.detach(), mask)), live)
        if self.weights:
            share = effective_share(totals["weight"], totals["weight_square"], totals["tokens"])
            metrics |= {"ess/mean": share, "ess/count": metrics["tokens/count"].to(share.dtype)}
        return metrics


def _one_of(key: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{key}: {value!r} is unknown; one of {', '.join(allowed)}")
    return str(value)
