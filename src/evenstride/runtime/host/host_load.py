"""How busy this machine is, for the policies that predict from it."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import psutil

from evenstride.core.policy import Policy

Loads = tuple[float, float]
"""Parts of the processors' time and of the memory in use, from 0 to 1."""


def unknown_loads() -> Loads:
    """Return what a rank reports whose policy does not ask."""
    return nan, nan


def machine_loads() -> Loads:
    """Return both loads; the processors' since the last call of this process."""
    cpu: float = psutil.cpu_percent(interval=None)
    memory: float = psutil.virtual_memory().percent
    return round(cpu / 100.0, 4), round(memory / 100.0, 4)


def loads_for(policy: Policy[Any]) -> Callable[[], Loads]:
    """Return what tells the loads that the policy asks for; reading them takes some 0.1 ms."""
    if getattr(policy, "predicts_from_loads", False):
        machine_loads()  # the first call tells nothing
        return machine_loads
    return unknown_loads
