"""Even steps from uneven workers: balanced, exact data-parallel training on PyTorch.

`Stride` needs torch, which takes a while to import; it is loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evenstride._version import __version__
from evenstride.errors import (
    ConfigError,
    EvenstrideError,
    InfeasibleShares,
    LaunchError,
    LimitError,
    LoaderBusy,
    OutOfMemory,
    RanksDisagree,
    ScaleError,
    ScenarioError,
    SplitDiverged,
    StepInFlight,
    TraceError,
    UnknownPolicy,
    UsageError,
    WorkerLost,
)

if TYPE_CHECKING:
    from evenstride.runtime.shards import Shards
    from evenstride.runtime.stride import Stride
    from evenstride.runtime.summary import Summary

__all__ = [
    "ConfigError",
    "EvenstrideError",
    "InfeasibleShares",
    "LaunchError",
    "LimitError",
    "LoaderBusy",
    "OutOfMemory",
    "RanksDisagree",
    "ScaleError",
    "ScenarioError",
    "Shards",
    "SplitDiverged",
    "StepInFlight",
    "Stride",
    "Summary",
    "TraceError",
    "UnknownPolicy",
    "UsageError",
    "WorkerLost",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "Stride":
        from evenstride.runtime.stride import Stride

        return Stride
    if name == "Shards":
        from evenstride.runtime.shards import Shards

        return Shards
    if name == "Summary":
        from evenstride.runtime.summary import Summary

        return Summary
    raise AttributeError(f"module 'evenstride' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
