"""A sink that writes to another one in a thread, for sinks that wait for a network or a disk."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace

from evenstride.runtime.sinks.snapshot import NamedMean, Sink, Snapshot

# Snapshots that may wait. An exchange is at least 0.3 s after the one before it.
_MOST_WAITING = 64
# The end of a run waits for the rest for this time.
_CLOSE_S = 30.0


class BackgroundSink:
    """Hands snapshots to a slow sink in a thread, so that neither training nor leader waits.

    While `_MOST_WAITING` snapshots wait, new ones are left out; their named means and alerts are
    written with the next one. An error of the slow sink is raised by the following call.

    Args:
        slow: The sink, already open.
        close_s: Seconds for which `close` waits for the snapshots that are left.
    """

    def __init__(self, slow: Sink, close_s: float = _CLOSE_S) -> None:
        self._slow, self._close_s = slow, close_s
        self._waiting: deque[Snapshot | None] = deque()
        self._ready = threading.Condition()
        self._error: Exception | None = None
        self._kept = Snapshot(0.0, 0, None)  # means and alerts of snapshots that were left out
        # A daemon, so that a server that does not answer cannot keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, name="evenstride-background-sink", daemon=True
        )
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of snapshots that are not written yet."""
        return len(self._waiting)

    def write(self, snapshot: Snapshot) -> None:
        """Queue a snapshot.

        Raises:
            Exception: whatever the slow sink raised for an earlier snapshot.
        """
        if self._error is not None:
            raise self._error
        found: tuple[NamedMean, ...] = self._kept.found + snapshot.found
        whole = replace(snapshot, found=found, alerts=self._kept.alerts + snapshot.alerts)
        if self.waiting >= _MOST_WAITING:
            self._kept = whole
        else:
            self._kept = replace(whole, found=(), alerts=())
            self._put(whole)

    def close(self) -> None:
        """Write what is left, and close the slow sink.

        Raises:
            TimeoutError: the sink did not finish in time; what is left is lost.
            Exception: whatever the slow sink raised.
        """
        if self._kept.found or self._kept.alerts:
            self._put(replace(self._kept, samples=()))
        self._put(None)
        self._thread.join(self._close_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            left = self.waiting - 1  # without the mark of the end
            raise TimeoutError(
                f"after {self._close_s:g} s, snapshots not yet written: {left}; they are lost"
            )

    def _put(self, snapshot: Snapshot | None) -> None:
        with self._ready:
            self._waiting.append(snapshot)
            self._ready.notify()

    def _run(self) -> None:
        try:
            while (snapshot := self._next()) is not None:
                self._slow.write(snapshot)
                self._waiting.popleft()
        except Exception as error:  # raised by the next call, on the leader's thread
            self._error = error
        try:
            self._slow.close()
        except Exception as error:
            self._error = self._error or error

    def _next(self) -> Snapshot | None:
        with self._ready:
            self._ready.wait_for(lambda: self._waiting)
            return self._waiting[0]
