"""Asynchronous training and bounded staleness: one worker's side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from evenstride.runtime.progress import Progress
from evenstride.runtime.sampler import Draw
from evenstride.runtime.served import server
from evenstride.runtime.served.calls import Servers
from evenstride.runtime.served.shard import settings_of
from evenstride.runtime.served.worker import Known, Served, receive, sent
from evenstride.runtime.timing import StepTimer


class Free(Served):
    """Sends its gradients whenever it has some, and goes on with the weights there are then.

    An update weighs ``W * b_k / B``: as much more as its batch is larger than an equal share, so
    that the sum of a round's updates does not depend on the split. With equal shares it is the
    asynchronous training of the papers, in which each update is a whole step.

    Args:
        rank: of this worker.
        world_size: number of workers.
        global_batch: ``B``.
        servers: number of servers.
        connect: starts and reaches them; collective.
        timer: the clock of this rank's steps.
        progress: its position.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        global_batch: int,
        servers: int,
        connect: Callable[[], Servers],
        timer: Callable[[], StepTimer],
        progress: Progress,
    ) -> None:
        super().__init__(servers, connect)
        self._rank, self._world_size, self._global_batch = rank, world_size, global_batch
        self._timer, self._progress = timer, progress
        self._step, self._counted = -1, -1
        self.position = 0  # samples of the epoch that are trained, by all workers
        self.waits = False  # whether this worker waits for others
        self.gone: tuple[int, ...] = ()  # workers that were, when the latest epoch ended
        self._report: dict[str, Any] = {}
        self._before: int | None = None  # updates of the runs that this one goes on from

    def factor(self, draw: Draw) -> float:
        """Return the weight of a batch's part in its update, and of the update among all."""
        self._step = draw.step
        part = draw.samples / draw.share if draw.share else 0.0
        return part * self._world_size * draw.claimed / self._global_batch

    def before_step(self, optimizer: Optimizer) -> None:
        """Let the servers apply this worker's gradients, and get the weights there are then."""
        known, settings = self.known(optimizer), settings_of(optimizer)
        counts = self._step != self._counted
        pushes = {
            index: (known.number, self._rank, settings, [sent(p) for p in mine], counts)
            for index, mine in known.parameters.items()
        }
        if counts and 0 not in pushes:  # the first server books every update
            pushes[0] = (known.number, self._rank, settings, [], True)
        answers = self.servers.call(server.push_now, pushes)
        receive(known, {index: answer[0] for index, answer in answers.items()})
        if not counts:
            return
        self._counted = self._step
        _, may, self.position = answers[0]
        self._timer().gradients_ready()  # so far it was this worker's own time
        if not may:
            self._wait(server.turn, self._rank)
            self.pull()

    def after_step(self, optimizer: Optimizer) -> None:
        """Nothing: the weights have come already."""

    def pull(self) -> None:
        """Get the weights as they are now, of all optimizers' parameters."""
        for known in self._known.values():
            self._pull(known)

    def take(self, epoch: int, end: int, samples: int) -> list[tuple[int, int]] | None:
        """Return the positions that this worker trains next, waiting if need be.

        Returns:
            Stretches; none if there are no more until this worker has trained what it has, and
            ``None`` if the epoch is over: then all workers have the same weights.
        """
        if self._before is None:
            self._before = self._progress.earlier
        with self._timer().waiting():
            stretches: list[tuple[int, int]] | None
            stretches = self._wait(server.take, self._rank, epoch, end, samples)
            if stretches is None:
                self._meet(end)
        return stretches

    def _meet(self, end: int) -> None:
        """Stand where all others do at the end of an epoch: weights, samples, updates made."""
        self.pull()
        progress, told = self._progress, self.servers.call(server.report, {0: ()})[0]
        progress.position = self.position = end
        progress.earlier = (self._before or 0) + told["count"] - progress.step
        self.gone = tuple(told["gone"])

    def release(self) -> None:
        """Give back what was taken and not trained."""
        if self._reached is not None and not self._reached.closed:
            with contextlib.suppress(Exception):  # the loop may have been left because of it
                self.servers.call(server.release, {0: (self._rank,)})

    def lost(self, rank: int) -> None:
        """Tell the servers that another worker is gone, from any thread."""
        if self._reached is not None:
            with contextlib.suppress(Exception):  # of whom nothing is expected any more
                everywhere = dict.fromkeys(range(len(self.servers)), (rank,))
                self.servers.call(server.leave, everywhere)

    def report(self) -> dict[str, Any]:
        """Return what the first server has counted: staleness, and samples handed out again."""
        if self._reached is not None and not self._reached.closed:
            with contextlib.suppress(Exception):
                self._report = self.servers.call(server.report, {0: ()})[0]
        return self._report

    def close(self, *, in_order: bool) -> None:
        """Part from the servers. May be called again."""
        if in_order:
            self.report()
        super().close(in_order=in_order)

    def _pull(self, known: Known) -> None:
        asked = dict.fromkeys(known.parameters, (known.number, self._rank))
        receive(known, self.servers.call(server.pull, asked))

    def _wait(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.waits = True
        try:
            return self.servers.call(function, {0: arguments})[0]
        finally:
            self.waits = False
