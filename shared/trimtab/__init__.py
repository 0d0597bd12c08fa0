"""trimtab: the methods that keep LLM reinforcement learning stable, for veRL and for TRL.

The names below load on first use, so that `import trimtab` costs nothing.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Objective": "trimtab.objective",
    "Recipe": "trimtab.recipe",
    "TrimtabError": "trimtab.errors",
    "list_recipes": "trimtab.recipe",
    "load_recipe": "trimtab.recipe",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
