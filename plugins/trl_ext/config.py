"""`TrimtabConfig`: TRL's arguments, filled in from a recipe."""

import dataclasses
import functools
import inspect
import os
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from trimtab.errors import TrimtabError
from trimtab.recipe import Recipe, load_recipe
from trl_ext.translate import ARGUMENTS, REPLACED, RIVALS, SAMPLED, batch_arguments


@dataclass
class TrimtabConfig(GRPOConfig):
    """TRL's `GRPOConfig` with a recipe: the recipe's values become TRL's arguments.

    Without a recipe it is a `GRPOConfig`. With one, a TRL argument that contradicts the recipe is an error: change
    the recipe instead, by an override. Arguments that a recipe does not state (devices, logging, vLLM's memory, ...)
    stay yours.

    Args:
        recipe: name of a bundled recipe, or path of a YAML file.
        overrides: `a.b.c=value` each.

    Raises:
        TrimtabError: a recipe that does not load, or an argument that contradicts it.

    Example:
        >>> config = TrimtabConfig("out", recipe="quickstart", overrides=["rollout.group_size=4"], use_cpu=True)
        >>> config.num_generations, config.learning_rate
        (4, 0.0003)
    """

    recipe: str | None = field(default=None, metadata={"help": "Name of a bundled trimtab recipe, or a YAML file."})
    overrides: list[str] | None = field(default=None, metadata={"help": "Values of the recipe to replace: a.b.c=x."})

    def __post_init__(self) -> None:
        if self.recipe is not None:
            self._apply(self.load_recipe())
        elif self.overrides:
            raise TrimtabError(f"overrides: {self.overrides} change a recipe, and there is none; pass recipe=")
        super().__post_init__()
        if self.recipe is not None and self.world_size != _world_size():
            raise TrimtabError(
                f"the recipe was laid out for {_world_size()} processes, but {self.world_size} train; on CPUs pass "
                "use_cpu=True"
            )

    def load_recipe(self) -> Recipe:
        """The recipe with its overrides. Loaded anew, since the arguments are pickled with every checkpoint."""
        return load_recipe(str(self.recipe), tuple(self.overrides or ()))

    def _apply(self, recipe: Recipe) -> None:
        given = self._given_arguments()
        wanted = {name: (key, value(recipe)) for name, (key, value) in ARGUMENTS.items()}
        self.scale_rewards = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)
        if self.generation_batch_size == recipe.rows_per_step:
            self.generation_batch_size = None  # the same said in another way; TRL takes only one of the two
        per_device = self.per_device_train_batch_size if "per_device_train_batch_size" in given else None
        micro = recipe.training.micro_batch_size
        if None not in (per_device, micro) and per_device != micro:
            wanted["per_device_train_batch_size"] = ("training.micro_batch_size", micro)
        sizes = batch_arguments(recipe, world_size=_world_size(), per_device=per_device)
        wanted = {name: ("training.mini_batch_size", value) for name, value in sizes.items()} | wanted
        problems = [
            f"{name}={getattr(self, name)!r} contradicts the recipe, where {key} makes it {value!r}"
            for name, (key, value) in wanted.items()
            if name in given and getattr(self, name) != value
        ]
        problems += [
            f"{name}={getattr(self, name)!r} acts in TRL's loss, which the recipe's objective replaces"
            for name in REPLACED
            if name in given and getattr(self, name) != _default(name)
        ]
        problems += [
            f"{name}={getattr(self, name)!r} is another way to say what the recipe says in {key}"
            for name, key in RIVALS.items()
            if name in given and getattr(self, name) != _default(name)
        ]
        sampled = sorted({*SAMPLED, *ARGUMENTS} & set(self.generation_kwargs or {}))
        problems += [f"generation_kwargs: {name} is the recipe's to say, in rollout" for name in sampled]
        if problems:
            raise TrimtabError(
                "\n  ".join([f"recipe {self.recipe}: change the recipe by an override instead", *problems])
            )
        for name, (_, value) in wanted.items():
            setattr(self, name, value)
        if "logging_steps" not in given:
            self.logging_steps = recipe.updates_per_step

    def _given_arguments(self) -> set[str]:
        """What the caller stated. A parser states everything; then it is what differs from the default."""
        names = {item.name for item in dataclasses.fields(self) if item.init}
        stated = self.__dict__.pop("_stated")
        return {name for name in names if getattr(self, name) != _default(name)} if stated >= names else stated


def _default(name: str) -> Any:
    item = TrimtabConfig.__dataclass_fields__[name]
    return item.default if item.default is not dataclasses.MISSING else item.default_factory()


def _world_size() -> int:
    """Known before TRL sets up its devices; torchrun and accelerate both export it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _remember_stated(init: Any) -> Any:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_stated"] = set(signature.bind(self, *args, **kwargs).arguments) - {"self"}
        init(self, *args, **kwargs)

    return remember


# A dataclass cannot tell an argument that was passed from a default; its generated __init__ can be asked.
TrimtabConfig.__init__ = _remember_stated(TrimtabConfig.__init__)
