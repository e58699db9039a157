"""The modes of synchronisation (``bsp``, ``asp``, ``local-sgd``, ...): their texts and rules.

Start with `mode_specs`. The package `runtime.synchronisation` implements the modes.
"""

from __future__ import annotations

from evenstride.core.sync_modes.mode_specs import (
    AllReduce,
    Asynchronous,
    DelayedMode,
    LocalSgd,
    ParameterServerMode,
    StaleSynchronous,
)

__all__ = [
    "AllReduce",
    "Asynchronous",
    "DelayedMode",
    "LocalSgd",
    "ParameterServerMode",
    "StaleSynchronous",
]
