"""Scripted faults, simulated or in real processes that are restarted after each fault.

Start with `fault_plan`, which decides which workers continue. `supervisor` runs a script under a
plan, and the script calls `fault_injection`. Imports `runtime` to start processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstride._importing import later

if TYPE_CHECKING:
    from evenstride.testing.faults.fault_plan import (
        Arrival,
        Fault,
        FaultPlan,
        Generation,
        simulate_plan,
    )
    from evenstride.testing.faults.supervisor import Job, Outcome, supervise

__all__ = [
    "Arrival",
    "Fault",
    "FaultPlan",
    "Generation",
    "Job",
    "Outcome",
    "simulate_plan",
    "supervise",
]

__getattr__ = later(
    __name__,
    {
        "fault_plan": ("Arrival", "Fault", "FaultPlan", "Generation", "simulate_plan"),
        "supervisor": ("Job", "Outcome", "supervise"),
    },
)
