"""Programs that run parts of `benchmarks/gpu.py` on a virtual device, some with a fault."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from benchmarks import gpu_features, gpu_peers
from benchmarks.gpu_peers import Stage, Trial

from evenstride.runtime.engines import fsdp_stalls
from evenstride.runtime.timing.device_timer import RankClock
from tests.virtual_device.timed import Fault, broken


def waits(rank: int, trial: Trial, fault: Fault) -> dict[str, Any]:
    """Return what part ``waits`` finds, with a fault of the timing or without one."""
    with broken(fault):
        return gpu_peers.waits(rank, trial)


def unmarked(rank: int, trial: Trial) -> dict[str, Any]:
    """Return what part ``waits`` finds if nothing marks the waits inside of FSDP2."""
    with patch.object(fsdp_stalls.StallMarks, "watch", lambda *_: None):
        return gpu_peers.waits(rank, trial)


def of_every_size(rank: int, trial: Trial) -> dict[str, Any]:
    """Return what feature ``sizes`` finds if first steps at a size are modelled."""
    if rank:
        return {}
    with patch.object(RankClock, "handed_out", lambda *_, **__: None):
        stage = Stage(trial.devices[0], trial.cores)
        return {"features": {"sizes": gpu_features.first_steps_at_a_size(stage, trial)}}
