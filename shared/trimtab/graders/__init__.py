"""Graders that turn completions and reference answers into rewards; `math_reward` needs `trimtab[math]`."""

from typing import TYPE_CHECKING, Any

from trimtab.graders.exact import exact_match_reward

if TYPE_CHECKING:
    from trimtab.graders.math import math_reward

__all__ = ["exact_match_reward", "math_reward"]


def __getattr__(name: str) -> Any:
    # Looked up on first use, so that exact matching needs no math-verify.
    if name == "math_reward":
        from trimtab.graders.math import math_reward

        return math_reward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
