"""Parameter servers in the lab: a worker starts them, and its limit is not meant for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import psutil

from evenstride.errors import LimitError
from evenstride.lab.limits.core_pinning import pin
from evenstride.lab.limits.cpu_limits import Limits

SERVER_MODULE = "evenstride.runtime.parameter_server.server_process"
_LOOK_S = 0.5


class ServerLimits:
    """Finds the servers that workers have started, and lifts the limits they inherited.

    Args:
        limits: of the workers.
        workers: their processes.
    """

    def __init__(self, limits: Limits, workers: Sequence[int]) -> None:
        self._limits, self._workers = limits, workers
        self._freed: set[int] = set()
        self._looked_s, self._last = 0.0, False

    def look(self, *, training: bool) -> None:
        """Free those that are new.

        At most twice per second, as a look costs milliseconds, and once more when training has
        begun: there are no new ones then.

        Args:
            training: whether a step was made.
        """
        now_s = time.monotonic()
        if self._last or now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s, self._last = now_s, training
        for pid in self._found():
            with contextlib.suppress(FileNotFoundError, LimitError):  # it has ended meanwhile
                self._limits.leave(pid)
                pin(pid, None)
                self._freed.add(pid)

    def _found(self) -> Iterator[int]:
        """Yield servers that are not free yet."""
        for worker in self._workers:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(worker).children():
                    with contextlib.suppress(psutil.Error):
                        if child.pid not in self._freed and SERVER_MODULE in child.cmdline():
                            yield child.pid
