"""The leader's output during a run: alerts in the log, numbers in the sinks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from math import floor, nan
from typing import Any

from evenstride.core.diagnostics.alerts import Alert, Alerts
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.runtime.sinks.snapshot import (
    LeaderSnapshot,
    NamedMean,
    Sample,
    Sink,
    Snapshot,
    error_text,
    neutral,
    numbers_of,
)

logger = logging.getLogger("evenstride")


class TelemetryBoard:
    """Derives alerts after each exchange, and writes the current numbers to the sinks.

    Errors here never end training: a sink that fails is named once in the log and removed.
    """

    def __init__(
        self, sinks: Mapping[str, Sink] | None = None, alerts: Alerts | None = None
    ) -> None:
        self._sinks, self._alerts = dict(sinks or {}), alerts or Alerts()
        self._booked, self._formed = Ledger.empty(0), 0
        self._found: deque[NamedMean] = deque()  # filled by the training thread
        self._means: dict[str, float] = {}
        self._pass: Mapping[str, Any] | None = None
        self._given = 0
        self.earlier = 0  # steps committed before this process
        self._step = 0
        self._epochs: float | None = None

    @property
    def sinks(self) -> Mapping[str, Sink]:
        """The working sinks, by name."""
        return self._sinks

    def count_from(self, earlier: int) -> None:
        """Set the number of steps committed before this process."""
        self.earlier = earlier

    def hear(self, kind: str, values: Mapping[str, Any]) -> None:
        """Store a record of the trace until the next snapshot; fast, because training waits."""
        if kind == "pass":
            self._pass = values
        elif kind == "metric" and self._sinks:
            value = nan if values["value"] is None else float(values["value"])
            name = neutral(values["name"])
            self._found.append(NamedMean(values["step"], values["epochs"], name, value))

    def look(self, known: LeaderSnapshot) -> tuple[Alert, ...]:
        """Return the new alerts of an exchange; each alert is returned once."""
        if known.control.fleet is None:
            return ()
        situation = known.control.situation(known.step, known.measured)
        self._alerts, alerts = self._alerts.after(situation, lockstep=known.lockstep)
        self._given += len(alerts)
        return tuple(replace(alert, worker=neutral(alert.worker)) for alert in alerts)

    def tell(self, known: LeaderSnapshot, alerts: tuple[Alert, ...]) -> None:
        """Write the current numbers and the alerts to all sinks."""
        if not self._sinks:
            return
        self._step, self._epochs = self.earlier + known.step, self._epochs_at(known)
        if known.formed != self._formed:
            self._booked, self._formed = Ledger.empty(0), known.formed
        numbers = [
            *numbers_of(known, self._booked, self._alerts),
            Sample("alerts_total", "", self._given),
        ]
        self._booked = known.ledger
        self._write(numbers, alerts, self._means_so_far())

    def close(self) -> None:
        """Write the remaining means, and close all sinks. Idempotent."""
        if self._found:
            self._write([], (), tuple(self._found))
        while self._sinks:
            text, sink = self._sinks.popitem()
            try:
                sink.close()
            except Exception as error:
                logger.warning("the sink %s failed to close (%s)", neutral(text), error_text(error))

    def _means_so_far(self) -> tuple[NamedMean, ...]:
        """Take the means up to the step of the snapshot.

        The training thread may have gone on to later steps. Their means wait for the next
        snapshot, so that rows of trackers are in the order of their steps.
        """
        known = range(len(self._found))  # more may be appended meanwhile.
        # Steps fall where a script goes back to an earlier state; what came before must not wait.
        count = max((n + 1 for n in known if self._found[n].step <= self._step), default=0)
        return tuple(self._found.popleft() for _ in range(count))

    def _write(
        self, numbers: list[Sample], alerts: tuple[Alert, ...], found: tuple[NamedMean, ...]
    ) -> None:
        self._means.update((one.name, one.value) for one in found)
        if numbers:
            numbers += [Sample("metric", name, value) for name, value in self._means.items()]
        snapshot = Snapshot(time.time(), self._step, self._epochs, tuple(numbers), found, alerts)
        for text, sink in list(self._sinks.items()):
            try:
                sink.write(snapshot)
            except Exception as error:  # on any error, training continues without the sink
                logger.warning(
                    "the sink %s failed (%s) and is removed; training continues",
                    neutral(text),
                    error_text(error),
                )
                del self._sinks[text]
                with contextlib.suppress(Exception):  # a failed sink may fail again
                    sink.close()

    def _epochs_at(self, known: LeaderSnapshot) -> float | None:
        """Return the epochs trained, counted from the start of the latest pass."""
        if self._pass is None:
            return None
        begun, samples = float(self._pass["epochs"]), int(self._pass["samples"])
        if not (known.lockstep and samples and known.control.fleet is not None):
            return begun
        steps = max(known.step - int(self._pass["step"]), 0)
        batch = self._pass.get("global_batch", known.control.fleet.global_batch)
        part = steps * int(batch) / samples
        return min(begun + part, floor(begun) + 1.0)
