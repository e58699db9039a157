"""Whether the servers that a call waits for still answer at all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence

import torch
from torch.distributed import rpc

from evenstride.errors import WorkerLost
from evenstride.runtime.parameter_server import server

# How often a server that is waited for is asked whether it is there.
EVERY_S = 5.0
# A server that does not answer that for so long hangs: it holds no lock for it.
SILENT_S = 30.0


class Pulse:
    """Asks servers that keep a worker waiting for a sign of life.

    A server may take its time with an answer, since that may depend on other workers. But it
    answers the question whether it is there at once, unless it was stopped, or its machine was cut
    off: then connections stay open, and nothing else would tell.
    """

    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, torch.futures.Future[None]]] = {}

    def feel(self, names: Iterable[str]) -> None:
        """Ask these servers, if it is time, and see whether they have answered.

        Raises:
            WorkerLost: one has not for `SILENT_S`.
        """
        now_s = time.monotonic()
        for name in names:
            asked_s, answer = self._asked.get(name, (-EVERY_S, None))
            if answer is not None and not answer.done():
                if now_s - asked_s > SILENT_S:
                    raise WorkerLost(
                        f"parameter {name} has not answered for {SILENT_S:.0f} s: it hangs, or "
                        "its machine cannot be reached; end it and start the run again: with "
                        "checkpoints it goes on from the newest one"
                    )
            elif now_s - asked_s >= EVERY_S:
                self._asked[name] = now_s, rpc.rpc_async(name, server.alive)


class KeepAlive:
    """Shows servers that this worker needs them, also while it asks them nothing for long.

    One whose own worker was lost ends when nobody asks it any more, see `server_process`.

    Args:
        names: of the servers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=_show, args=(names, self._ends), name="evenstride-care", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End it, before this process' agent does."""
        self._ends.set()
        self._thread.join()


def _show(names: Sequence[str], ends: threading.Event) -> None:
    while not ends.wait(EVERY_S):
        for name in names:
            with contextlib.suppress(RuntimeError):  # it is gone: the next call tells
                rpc.rpc_async(name, server.alive)
