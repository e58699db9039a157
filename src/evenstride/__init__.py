"""Even steps from uneven workers: balanced, exact data-parallel training on PyTorch.

`Stride` and `Checkpointer` import torch, which takes a second or two. They are imported when first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evenstride._importing import import_to_train as _import_to_train
from evenstride._version import __version__
from evenstride.errors import (
    CheckpointDamaged,
    CheckpointError,
    ConfigError,
    EvenstrideError,
    InfeasibleShares,
    LoaderBusy,
    OutOfMemory,
    RanksDisagree,
    ScaleError,
    SplitDiverged,
    StepInFlight,
    UnknownPolicy,
    UsageError,
    WorkerLost,
)

if TYPE_CHECKING:
    from evenstride.core.policy import Keep, Move, Policy, Situation
    from evenstride.runtime.checkpoint.checkpointer import Checkpointer
    from evenstride.runtime.loading.shards import Shards
    from evenstride.runtime.loading.streams import Stream
    from evenstride.runtime.sinks.snapshot import Sink, Snapshot
    from evenstride.runtime.stride import Stride
    from evenstride.runtime.telemetry.summary import Summary

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "Checkpointer",
    "ConfigError",
    "EvenstrideError",
    "InfeasibleShares",
    "Keep",
    "LoaderBusy",
    "Move",
    "OutOfMemory",
    "Policy",
    "RanksDisagree",
    "ScaleError",
    "Shards",
    "Sink",
    "Situation",
    "Snapshot",
    "SplitDiverged",
    "StepInFlight",
    "Stream",
    "Stride",
    "Summary",
    "UnknownPolicy",
    "UsageError",
    "WorkerLost",
    "__version__",
]


_LATER = {
    "Checkpointer": "evenstride.runtime.checkpoint.checkpointer",
    "Keep": "evenstride.core.policy",
    "Move": "evenstride.core.policy",
    "Policy": "evenstride.core.policy",
    "Shards": "evenstride.runtime.loading.shards",
    "Sink": "evenstride.runtime.sinks.snapshot",
    "Situation": "evenstride.core.policy",
    "Snapshot": "evenstride.runtime.sinks.snapshot",
    "Stream": "evenstride.runtime.loading.streams",
    "Stride": "evenstride.runtime.stride",
    "Summary": "evenstride.runtime.telemetry.summary",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(_import_to_train(_LATER[name]), name)
    raise AttributeError(f"module 'evenstride' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
