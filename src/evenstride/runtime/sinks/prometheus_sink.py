"""A sink that answers Prometheus: the latest numbers, as long as the run goes on."""

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

# How long the end of a run waits for the server's thread.
_JOIN_S = 2.0


class PrometheusSink:
    """Serves the latest snapshot over HTTP; whoever asks pays for the answer, not the exchange.

    Port 0 takes a free port, which the log names.
    """

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._latest: Snapshot | None = None
        # Not the library's global registry, in which a script may have metrics of its own.
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
        """What is answered."""
        return self._latest

    def write(self, snapshot: Snapshot) -> None:
        """Answer with this from now on; those who left are no part of it."""
        # The last snapshot of a run may hold means only; the other numbers stay.
        if snapshot.samples:
            self._latest = snapshot

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)


def _leave_to_this_process(server: Any) -> None:
    """Close the port in processes that are forked, such as those of a data loader.

    They may outlive this one for some seconds, and the run could not be started again meanwhile.
    """
    known = weakref.ref(server)  # what is called after a fork stays registered for ever

    def close() -> None:
        found = known()
        if found is not None:
            found.socket.close()

    os.register_at_fork(after_in_child=close)


class _Latest:
    """Makes the latest snapshot into what the library writes out."""

    def __init__(self, sink: PrometheusSink) -> None:
        self._sink = sink

    def collect(self) -> Iterator[Family]:
        """Yield a family for each name that has a number."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._sink.latest
        if snapshot is None:
            return
        told: dict[str, list[Sample]] = {"step": [Sample("step", "", snapshot.step)]}
        if snapshot.epochs is not None:
            told["epochs"] = [Sample("epochs", "", snapshot.epochs)]
        for sample in snapshot.samples:
            told.setdefault(sample.metric, []).append(sample)
        for metric in METRICS:
            family = CounterMetricFamily if metric.counts else GaugeMetricFamily
            made = family(
                PREFIX + metric.name, metric.means, labels=[metric.label] if metric.label else []
            )
            for sample in told.get(metric.name, ()):
                made.add_metric([sample.label] if metric.label else [], sample.value)
            if made.samples:
                yield made


def why(error: OSError) -> str:
    """Return what a person makes of an error in listening."""
    if error.errno == errno.EADDRINUSE:
        return "the port is in use"
    return error.strerror or str(error)
