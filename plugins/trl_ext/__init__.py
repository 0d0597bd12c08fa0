"""trimtab inside TRL: a trainer and a config to put where `GRPOTrainer` and `GRPOConfig` stood.

The names below load on first use: importing the adapter loads no framework.
"""

import importlib
from typing import Any

_HOME = {"TrimtabConfig": "trl_ext.config", "TrimtabGRPOTrainer": "trl_ext.trainer"}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'trl_ext' has no attribute {name!r}")
