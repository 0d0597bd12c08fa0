"""What a recipe may say: every key, its type and its bounds."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trimtab.advantages import BASELINES, SCALES
from trimtab.aggregation import MODES
from trimtab.objective import MASKS, PENALTIES, SURROGATES, WEIGHTS, Objective
from trimtab.objective.compose import ANCHORS, DENOMINATORS
from trimtab.recipe.base import Choice, Section
from trimtab.recipe.terms import MethodOf

Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
A_LIST = Field(strict=False)  # YAML has lists, a frozen recipe tuples


class Reference(Section):
    """Where the pipeline was published."""

    arxiv: str | None = None
    url: str | None = None


class Data(Section):
    """The prompts: a data set's name, or a .jsonl, .json, .csv or .parquet file; and the names of its columns.

    Of several names for the answers the first that is there is taken; `column.field` is a field of a column.
    """

    train: str
    evaluation: str | None = None
    prompt: str = "prompt"
    answer: str | Annotated[tuple[str, ...], A_LIST] = "answer"
    max_prompt_length: Count = 1024


class MathReward(Section):
    """1 if the answer is mathematically equal, else 0 (`trimtab.graders.math_reward`)."""

    name: Literal["math"]
    weight: float = 1.0


class ExactReward(Section):
    """1 if the answer is the same text, else 0 (`trimtab.graders.exact_match_reward`)."""

    name: Literal["exact"]
    weight: float = 1.0


class OverlongReward(Section):
    """0 to -1 over the last tokens before the limit (`trimtab.rewards.overlong_penalty`)."""

    name: Literal["overlong"]
    max_length: Count
    buffer: Annotated[int, Field(ge=0)]
    weight: float = 1.0

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError(f"buffer {self.buffer} is longer than max_length {self.max_length}")
        return self


Reward = Annotated[MathReward | ExactReward | OverlongReward, Field(discriminator="name")]


class Advantage(Section):
    """From rewards to advantages (`trimtab.advantages`)."""

    name: Literal["group"] = "group"
    baseline: Annotated[str, Choice(BASELINES)] = "mean"
    scale: Annotated[str, Choice(SCALES)] = "group_std"
    eps: Annotated[float, Field(ge=0)] = 1e-6


class Aggregation(Section):
    """From a loss per token to one number (`trimtab.aggregation`)."""

    mode: Annotated[str, Choice(MODES)]
    denominator: Annotated[str, Choice(DENOMINATORS)] = "original"
    max_length: Count | None = None


class ObjectiveSection(Section):
    """The five places of the loss (`trimtab.objective`)."""

    old_log_prob: Annotated[str, Choice(ANCHORS)] = "recompute"
    surrogate: Annotated[Any, MethodOf(SURROGATES)]
    weights: Annotated[tuple[Annotated[Any, MethodOf(WEIGHTS)], ...], A_LIST] = ()
    masks: Annotated[tuple[Annotated[Any, MethodOf(MASKS)], ...], A_LIST] = ()
    penalties: Annotated[tuple[Annotated[Any, MethodOf(PENALTIES)], ...], A_LIST] = ()
    aggregation: Aggregation

    @model_validator(mode="after")
    def _composes(self) -> Self:
        Objective(**self.model_dump())
        node = self.aggregation
        if node.max_length is not None and node.mode != "seq-mean-token-sum-norm":
            raise ValueError(f"aggregation.max_length: {node.max_length} acts only under seq-mean-token-sum-norm")
        for mask in self.masks:
            if mask.name == "rejection" and (mask.low, mask.high, mask.veto) == (None, None, None):
                raise ValueError("masks.rejection: without low, high or veto it drops nothing")
        drops = self.masks or any(use.bound == "mask" and (use.low or use.high) for use in self.weights)
        if node.denominator == "kept" and not drops:
            raise ValueError("aggregation.denominator: kept counts the tokens not dropped, and nothing here drops any")
        return self


class Rollout(Section):
    """How answers are sampled. A step of a recipe is one rollout and all the updates on it."""

    engine: Literal["vllm", "transformers"] = "vllm"
    group_size: Annotated[int, Field(ge=2)]
    prompts_per_step: Count
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_length: Count


class DynamicSampling(Section):
    """Drop groups without a spread of the metric, and sample more until the batch is full."""

    metric: Literal["accuracy"] = "accuracy"
    max_batches: Count = 10


class Sampling(Section):
    """Which prompts and groups are trained on."""

    dynamic: DynamicSampling | None = None
    curriculum: None = None


class Training(Section):
    """Sizes and lengths, in answers (rows) and in steps."""

    mini_batch_size: Count
    micro_batch_size: Count | None = None
    epochs_per_rollout: Count = 1
    steps: Count
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # NumPy takes no larger one
    checkpoint_every: Count | None = 20  # null: never, and an interrupted run starts over
    shuffle_rewards: bool = False


class Optimizer(Section):
    """The optimizer, with a constant learning rate after a linear warm-up of some steps."""

    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    betas: Annotated[tuple[Beta, Beta], A_LIST] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8


class Moe(Section):
    """Mixture-of-experts models."""

    routing_replay: Literal["none"] = "none"


class Precision(Section):
    """Number formats; `auto` leaves the choice to the framework."""

    train: Literal["bf16", "fp16", "fp32"] = "bf16"
    rollout: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    lm_head: Literal["auto", "fp32"] = "auto"
    kv_cache: Literal["auto"] = "auto"


class Recipe(Section):
    """One pipeline, whole. See `trimtab.recipe.load_recipe`."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # it names the run's folder
    title: str = ""
    reference: Reference = Reference()
    model: str
    data: Data
    reward: Annotated[tuple[Reward, ...], A_LIST, Field(min_length=1)]
    advantage: Advantage = Advantage()
    objective: ObjectiveSection
    rollout: Rollout
    sampling: Sampling = Sampling()
    training: Training
    optimizer: Optimizer
    schedules: dict[str, Any] = {}
    moe: Moe = Moe()
    precision: Precision = Precision()
    sources: dict[str, Literal["paper", "code", "secondary", "project"]] = {}

    @field_validator("schedules")
    @classmethod
    def _no_schedules_yet(cls, schedules: dict[str, Any]) -> dict[str, Any]:
        if schedules:
            raise ValueError(f"{', '.join(schedules)}: no schedule is available in this version; leave it empty")
        return schedules

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        rows = self.rows_per_step
        if rows % self.training.mini_batch_size:
            raise ValueError(
                f"training.mini_batch_size: {self.training.mini_batch_size} must divide the {rows} answers of a step "
                f"(rollout.prompts_per_step {self.rollout.prompts_per_step} x rollout.group_size "
                f"{self.rollout.group_size})"
            )
        micro = self.training.micro_batch_size
        if micro is not None and self.training.mini_batch_size % micro:
            raise ValueError(
                f"training.micro_batch_size: {micro} must divide training.mini_batch_size "
                f"{self.training.mini_batch_size}"
            )
        return self

    @model_validator(mode="after")
    def _rewards_act(self) -> Self:
        names = [node.name for node in self.reward]
        for node in self.reward:
            if names.count(node.name) > 1:
                raise ValueError(f"reward: {node.name} comes twice")
            if node.weight == 0:
                raise ValueError(f"reward.{node.name}.weight: 0 would do nothing; leave the reward out")
        return self

    @property
    def rows_per_step(self) -> int:
        """Answers sampled in one step."""
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates made on one rollout."""
        return self.rows_per_step // self.training.mini_batch_size * self.training.epochs_per_rollout
