"""A sink that serves the latest numbers to Prometheus for the duration of the run."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from evenstride.runtime.sinks.snapshot import METRICS, PREFIX, Sample, Snapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

logger = logging.getLogger("evenstride")

# The end of a run waits for the server's thread for this time.
_JOIN_S = 2.0


class PrometheusSink:
    """Serves the latest snapshot over HTTP; formats it per request, not per exchange.

    Port 0 selects a free port, which the log names.
    """

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._latest: Snapshot | None = None
        # Not the library's global registry, which may hold metrics of the script.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Latest(self))
        self._server, self._thread = start_http_server(port, host, registry)
        self._thread.name = "evenstride-prometheus"
        _leave_to_this_process(self._server)
        self.port = int(self._server.server_port)
        level = logging.INFO if port else logging.WARNING
        logger.log(level, "metrics for Prometheus at http://%s:%d/metrics", host, self.port)

    @property
    def latest(self) -> Snapshot | None:
        """The snapshot that requests receive."""
        return self._latest

    def write(self, snapshot: Snapshot) -> None:
        """Serve this snapshot from now on, without workers that left."""
        # The last snapshot of a run may hold named means only; the earlier one stays then.
        if snapshot.samples:
            self._latest = snapshot

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)


def _leave_to_this_process(server: Any) -> None:
    """Close the port in forked processes, such as those of a data loader.

    They may outlive this process for some seconds, in which the run could not be restarted.
    """
    known = weakref.ref(server)  # a fork hook stays registered for ever

    def close() -> None:
        found = known()
        if found is not None:
            found.socket.close()

    os.register_at_fork(after_in_child=close)


class _Latest:
    """Converts the latest snapshot to the metric families of the library."""

    def __init__(self, sink: PrometheusSink) -> None:
        self._sink = sink

    def collect(self) -> Iterator[Family]:
        """Yield a family for each metric that has a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._sink.latest
        if snapshot is None:
            return
        samples: dict[str, list[Sample]] = {"step": [Sample("step", "", snapshot.step)]}
        if snapshot.epochs is not None:
            samples["epochs"] = [Sample("epochs", "", snapshot.epochs)]
        for sample in snapshot.samples:
            samples.setdefault(sample.metric, []).append(sample)
        for metric in METRICS:
            family = CounterMetricFamily if metric.counts else GaugeMetricFamily
            made = family(
                PREFIX + metric.name, metric.means, labels=[metric.label] if metric.label else []
            )
            for sample in samples.get(metric.name, ()):
                made.add_metric([sample.label] if metric.label else [], sample.value)
            if made.samples:
                yield made


def why(error: OSError) -> str:
    """Return a readable reason for an error in listening."""
    if error.errno == errno.EADDRINUSE:
        return "the port is in use"
    return error.strerror or str(error)
