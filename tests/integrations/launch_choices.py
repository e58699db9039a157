"""Clusters that tests start, or write files for."""

from __future__ import annotations

from evenstride.planner.search.training_forecast import ClusterChoice
from tests.unit.planner.kinds import kind

GPUS = ClusterChoice(
    (
        kind("g4dn.12xlarge", workers=4, place="aws/us-east-1", accelerators="T4:4"),
        kind("g5.xlarge", place="aws/us-east-1", losses_per_h=0.1, accelerators="A10G:1"),
    ),
    (2, 3),
    512,
)
"""Two types with GPUs, of which the second may be preempted."""

CPUS = ClusterChoice((kind("c6i.large", place="azure/eastus"),), (4,), 256)
"""One type on demand."""

SMALL = ClusterChoice((kind("big", workers=2), kind("small", losses_per_h=0.1)), (1, 2), 12)
"""Three machines with four workers, which a test starts on this machine."""
