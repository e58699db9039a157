"""Who takes part in the next step, as torchft's Lighthouse says, and their messages to each other.

Everything here is called by the training thread, between two steps. Messages go through the very
connections that average the gradients, so a worker that dies breaks them at once, whoever waits.
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
    host: str  # name or address under which the other workers reach this one
    min_workers: int  # fewest workers that a step may be trained by
    timeout_s: float  # how long a collective, a vote or the transfer of weights may take
    quorum_timeout_s: float  # how long a worker waits for a quorum


class Quorums:
    """This worker's side of torchft: quorum, collectives and vote."""

    def __init__(self, endpoint: WorkerEndpoint) -> None:
        timeout = timedelta(seconds=endpoint.timeout_s)
        self._endpoint = endpoint
        self._latest: Quorum | None = None
        self._known = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="evenstride-quorum")
        # Other workers meet here when this one is the first of a quorum.
        self._store = TCPStore(endpoint.host, 0, is_master=True, wait_for_workers=False)
        self._group: Any = ProcessGroupGloo(timeout=timeout)
        self._hear_of_quorums()
        self.manager: Any = Manager(
            pg=self._group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=endpoint.min_workers,
            # Else a newcomer would hear of its quorum after it has got its weights only.
            use_async_quorum=True,
            # All start from equal weights, which is checked; who comes later gets the others'.
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
        """Return the quorum of the next step, weights that are on their way or not.

        `Broken` says that its workers could not be connected. `WorkerLost` says that the Lighthouse
        does not answer, or that too few workers came in time.
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
        """Return the texts of all workers, in the order of their ranks; collective.

        `Broken` says that a worker is gone.
        """
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        try:
            sizes = [int(size) for size in self._all(torch.tensor([len(mine)]))]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(mine)] = mine
            rows = self._all(padded)
        except Exception as error:  # torch raises what it likes when a connection closes
            raise Broken(f"a worker is gone: {error}") from error
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, sizes, strict=True)]

    def add_up(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors by their sums over all workers that have their weights; collective.

        If a worker is gone, what they hold is garbage, and `vote` says no.
        """
        works = [self.manager.allreduce(tensor, reduce_op=ReduceOp.SUM) for tensor in tensors]
        for work in works:
            work.wait()

    def vote(self) -> bool:
        """Return whether this worker may keep the step; whoever may not gets it from those who do.

        Whatever was received meanwhile (weights, optimizer states) is put in place by this call.
        """
        if self.manager.errored():
            # Nobody must wait for this worker in a collective that it has given up.
            self._group.abort()
        return bool(self.manager.should_commit())

    def give_up(self, error: Exception) -> None:
        """Drop the step in hand without training it."""
        self.manager.report_error(error)
        self.vote()

    def close(self) -> None:
        """Leave; the others notice it by the connections that end."""
        self.manager.shutdown(wait=False)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._group.abort(errored=False)

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert self._latest is not None, "there is a quorum before anything is gathered"
        rows = [torch.zeros_like(tensor) for _ in range(self._latest.world_size)]
        self._group.allgather([rows], [tensor], AllgatherOptions()).wait()
        return rows

    def _hear_of_quorums(self) -> None:
        """Learn of a quorum when it is connected, which is before weights are received."""
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
            f"worker {one.name} asked for a quorum and got none within {one.quorum_timeout_s:.0f} "
            f"s ({error}); a step needs the Lighthouse at {one.lighthouse} and as many workers as "
            f"it and min_workers={one.min_workers} ask for: start them, or ask for fewer"
        )
