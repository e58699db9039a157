"""The workers of the next step, as torchft's Lighthouse reports them, and messages between them.

The training thread calls everything here, between two steps. Messages use the same connections as
the sums of gradients, so a worker that fails breaks them at once for every worker that waits.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    ReduceOp,
)
from torchft import Manager, ProcessGroupGloo

from evenstride.errors import WorkerLost
from evenstride.integrations.torchft.live_generation import Broken, Quorum


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """How a worker finds the others."""

    name: str  # of this worker, the same after a restart
    lighthouse: str  # address of the Lighthouse
    host: str  # name or address at which other workers reach this one
    min_workers: int  # smallest number of workers that may train a step.
    timeout_s: float  # that a collective, a vote or the transfer of weights may take
    quorum_timeout_s: float  # for which a worker waits for a quorum


class Quorums:
    """This worker's side of torchft: quorum, collectives and vote."""

    def __init__(self, endpoint: WorkerEndpoint) -> None:
        timeout = timedelta(seconds=endpoint.timeout_s)
        self._endpoint = endpoint
        self._latest: Quorum | None = None
        self._known = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="evenstride-quorum")
        # Other workers connect here when this one is the first of a quorum.
        self._store = TCPStore(endpoint.host, 0, is_master=True, wait_for_workers=False)
        self._group: Any = ProcessGroupGloo(timeout=timeout)
        self._hear_of_quorums()
        self.manager: Any = Manager(
            pg=self._group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=endpoint.min_workers,
            # Otherwise a worker that joins would learn its quorum only after it has its weights.
            use_async_quorum=True,
            # All start from equal weights, which is checked; a later worker gets those weights.
            init_sync=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=endpoint.quorum_timeout_s),
            connect_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=endpoint.host,
            store_port=self._store.port,
            lighthouse_addr=endpoint.lighthouse,
            replica_id=endpoint.name,
            hostname=endpoint.host,
        )

    def begin(self) -> Quorum:
        """Return the quorum of the next step, even while weights are being received.

        Raises `Broken` if its workers could not be connected, and `WorkerLost` if the Lighthouse
        does not answer or too few workers came in time.
        """
        self._known.clear()
        try:
            self.manager.start_quorum()
            waiting = self._pool.submit(self._wait)
            self._known.wait()
            if waiting.done():
                waiting.result()
        except (RuntimeError, TimeoutError, OSError) as error:
            raise self._no_quorum(error) from error
        if self.manager.errored() or self._latest is None:
            raise Broken(f"the quorum could not be connected: {self.manager.errored()}")
        return self._latest

    def gather(self, text: str) -> list[str]:
        """Return the texts of all workers, in rank order; collective.

        Raises `Broken` if a worker is gone.
        """
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        try:
            sizes = [int(size) for size in self._all(torch.tensor([len(mine)]))]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(mine)] = mine
            rows = self._all(padded)
        except Exception as error:  # torch raises various types when a connection closes
            raise Broken(f"a worker is gone: {error}") from error
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, sizes, strict=True)]

    def add_up(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors by their sums over all workers that have their weights; collective.

        If a worker is gone, the sums are wrong, and `vote` returns ``False``.
        """
        works = [self.manager.allreduce(tensor, reduce_op=ReduceOp.SUM) for tensor in tensors]
        for work in works:
            work.wait()

    def vote(self) -> bool:
        """Return whether this worker may keep the step; otherwise it gets the others' state.

        This call also loads what was received in the meantime (weights, optimizer states).
        """
        if self.manager.errored():
            # No worker must wait for this one in a collective that it has given up.
            self._group.abort()
        return bool(self.manager.should_commit())

    def give_up(self, error: Exception) -> None:
        """Drop the current step without training it."""
        self.manager.report_error(error)
        self.vote()

    def close(self) -> None:
        """Leave; the others notice it by the closed connections."""
        self.manager.shutdown(wait=False)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._group.abort(errored=False)

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert self._latest is not None, "a quorum exists before anything is gathered"
        rows = [torch.zeros_like(tensor) for _ in range(self._latest.world_size)]
        self._group.allgather([rows], [tensor], AllgatherOptions()).wait()
        return rows

    def _hear_of_quorums(self) -> None:
        """Note a quorum when it is connected, which is before weights are received."""
        configure = self._group.configure

        def heard(store: str, replica: str, rank: int, size: int, number: int, *rest: Any) -> None:
            self._latest = None
            configure(store, replica, rank, size, number, *rest)
            self._latest = Quorum(number, rank, size)
            self._known.set()

        self._group.configure = heard

    def _wait(self) -> None:
        try:
            self.manager.wait_quorum()
        finally:
            self._known.set()

    def _no_quorum(self, error: Exception) -> WorkerLost:
        one = self._endpoint
        return WorkerLost(
            f"worker {one.name} found no quorum within {one.quorum_timeout_s:.0f} s ({error}). A "
            f"step needs the Lighthouse at {one.lighthouse}, and as many workers as the Lighthouse "
            f"and min_workers={one.min_workers} require: start them, or require fewer"
        )
