"""A Ray cluster on this machine: several raylets, each with a CPU limit, on loopback addresses."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import psutil

from evenstride.lab.processes.cpu_limits import open_limits

# Ray replaces 127.0.0.1 by the address of a network interface, but no other loopback address.
_HOST = "127.0.0.{}"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2",
    "OMP_NUM_THREADS": "1",
}

# How Ray notices a lost raylet: after 4 s instead of about 30 s.
_QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


class Raylets:
    """The nodes of a cluster. The first one, for the controllers, has no CPU for training."""

    def __init__(self, most: int) -> None:
        from ray.cluster_utils import Cluster

        self._limits, self._stack = open_limits(most)[0], contextlib.ExitStack()
        self._stack.callback(self._limits.close)
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "node_ip_address": _HOST.format(2),
            "_system_config": _QUICK,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._stack.callback(self._cluster.shutdown)
        self.speeds: dict[str, float] = {}
        """The speed of each node by its address."""

    def add(self, speed: float = 1.0) -> None:
        """Add a node for one worker, with a fraction of a core."""
        number = len(self.speeds)
        address = _HOST.format(3 + number)
        self.speeds[address] = speed
        node: Any = self._cluster.add_node(num_cpus=1, node_ip_address=address)
        if speed < 1:
            self._limits.set_speed(number, speed)
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            # Processes that start later inherit the limit.
            for process in (raylet, *raylet.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._limits.join(number, process.pid)

    def connect(self) -> None:
        """Connect this process, the driver."""
        import ray

        ray.init(
            address=self._cluster.address, _node_ip_address=_HOST.format(2), log_to_driver=False
        )
        self._stack.callback(ray.shutdown)

    def close(self) -> None:
        """End all processes of the cluster."""
        self._stack.close()


@contextlib.contextmanager
def raylets(speeds: Sequence[float], most: int | None = None) -> Iterator[Raylets]:
    """Start a cluster with a node for each speed, and room for ``most`` nodes; connect to it."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short, because sockets lie in it
    with patch.dict(os.environ, {**_ENVIRONMENT, "RAY_TMPDIR": folder}):
        cluster = Raylets(most or len(speeds))
        try:
            for speed in speeds:
                cluster.add(speed)
            cluster.connect()
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder, ignore_errors=True)
