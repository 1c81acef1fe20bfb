"""kvtune in Python: its commands, its adapters, and the cache that they were trained with.

Nothing heavy is imported before it is used: `import kvtune` loads neither torch nor Transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import KvPolicyCache, conformance
    from .errors import KvtuneError
    from .policy_file import initial_part
    from .runs import Run, load, run

__all__ = ["KvPolicyCache", "KvtuneError", "Run", "conformance", "initial_part", "load", "run"]

_MODULES = {
    **dict.fromkeys(("KvPolicyCache", "conformance"), "cache"),
    **dict.fromkeys(("Run", "load", "run"), "runs"),
    "KvtuneError": "errors",
    "initial_part": "policy_file",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module `kvtune` has no attribute `{name}`")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
