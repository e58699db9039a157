"""Asynchronous training and bounded staleness: one worker's side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from evenstride.core.sampling.draw import Draw
from evenstride.errors import UsageError
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.parameter_server import server
from evenstride.runtime.parameter_server.parameter_shard import Settings, settings_of
from evenstride.runtime.parameter_server.server_calls import ServerConnections
from evenstride.runtime.parameter_server.server_worker import (
    ServedOptimizer,
    ServedWorker,
    receive,
    sent,
)
from evenstride.runtime.timing.rank_clock import RankClock


class AsyncWorker(ServedWorker):
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
        clock: of this rank's steps.
        progress: its position.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        global_batch: int,
        servers: int,
        connect: Callable[[], ServerConnections],
        clock: RankClock,
        progress: CommittedPosition,
    ) -> None:
        super().__init__(servers, connect)
        self._rank, self._world_size, self._global_batch = rank, world_size, global_batch
        self._clock, self._progress = clock, progress
        self._step, self._counted = -1, -1
        self.position = 0  # samples of the epoch that are trained, by all workers
        self.waits = False  # whether this worker waits for others
        # Samples that each worker trained in the latest epoch that ended; empty without any.
        self.split: tuple[int, ...] = ()
        self._report: dict[str, Any] = {}
        self._before: int | None = None  # updates of the runs that this one goes on from

    def factor(self, draw: Draw) -> float:
        """Return the weight of a batch's part in its update, and of the update among all."""
        self._step = draw.step
        part = draw.samples / draw.share if draw.share else 0.0
        return part * self._world_size * draw.claimed / self._global_batch

    def before_step(self, optimizer: Optimizer) -> None:
        """Let the servers apply this worker's gradients, and get the weights there are then.

        Raises:
            UsageError: the update has been made already, or another optimizer made those before.
        """
        known, settings = self.known(optimizer), settings_of(optimizer)
        if len(self._known) > 1 or self._step == self._counted:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called after an update was made, which is "
                "one step of one optimizer in this mode of synchronisation: other workers go on "
                "with the weights at once, and the epoch may end with it; use one optimizer with "
                'several parameter groups, one step() for each batch, or sync="bsp-ps"'
            )
        may = self._push(known, settings)
        self._counted = self._step
        self._clock.timer.gradients_ready()  # so far it was this worker's own time
        if not may:
            # The others went on during the wait, so the weights that came with the push are stale.
            self._wait(server.turn, self._rank)
            self.pull(self._rank)

    def _push(self, known: ServedOptimizer, settings: Settings) -> bool:
        """Send gradients, get weights, and return whether this worker may go on at once.

        The update is booked when all servers have applied it, not before: the epoch may end with
        it, and all workers are to have the same weights then. One server can do both at once. Of
        several, some may have applied it when this worker is taken for lost: then its samples are
        trained once more by another.
        """
        pushes = {
            index: (known.number, self._rank, settings, [sent(p) for p in mine])
            for index, mine in known.parameters.items()
        }
        if 0 not in pushes:  # the first server counts every update
            pushes[0] = (known.number, self._rank, settings, [])
        if len(self.servers) == 1:
            weights, (may, self.position) = self.servers.call(server.push_all, pushes)[0]
            receive(known, {0: weights})
            return bool(may)
        answers = self.servers.call(server.push_now, pushes)
        receive(known, {index: weights for index, (weights, _) in answers.items()})
        may, self.position = self.servers.call(server.made, {0: (self._rank, answers[0][1])})[0]
        return bool(may)

    def take(
        self, epoch: int, end: int, samples: int, most_steps: int | None
    ) -> list[tuple[int, int]] | None:
        """Return the positions that this worker trains next, waiting if need be.

        Args:
            epoch: that it is in.
            end: samples of the epoch.
            samples: that it would have.
            most_steps: global batches of samples that the run trains, over all workers, since no
                two have the same number of steps; ``None`` for no limit.

        Returns:
            Stretches; none if there are no more until this worker has trained what it has, and
            ``None`` if the epoch is over: then all workers have the same weights.
        """
        if self._before is None:
            # Once, at the first batch: a checkpoint has been restored by then, and `_meet` moves
            # it.
            self._before = self._progress.earlier
        with self._clock.waiting():
            stretches: list[tuple[int, int]] | None
            most = None if most_steps is None else most_steps * self._global_batch
            stretches = self._wait(server.take, self._rank, epoch, end, samples, most)
            if stretches is None:
                self._meet()
        return stretches

    def _meet(self) -> None:
        """Stand where all others do at the end of an epoch: weights, samples, updates made.

        A limit of steps may have ended it before its last sample, or before its first; then it is
        no further than it was.
        """
        self.pull(self._rank)
        progress, told = self._progress, self.servers.call(server.report, {0: ()})[0]
        self.position = told["position"] or progress.position
        progress.meet(self.position, (self._before or 0) + told["count"])
        self.split = tuple(told["trained"])

    def release(self) -> None:
        """Give back what was taken and not trained."""
        if self._reached is not None and not self._reached.closed:
            with contextlib.suppress(Exception):  # the loop may have been left because of it
                self.servers.call(server.release, {0: (self._rank,)})

    def lost(self, rank: int) -> bool:
        """Tell the servers that another worker is gone, from any thread.

        Returns:
            Whether the others can go on without it: not before all have met.
        """
        if self._reached is None:
            return False
        with contextlib.suppress(Exception):  # of whom nothing is expected any more
            self.servers.call(server.leave, self._everywhere(rank))
        return True

    def present(self) -> tuple[int, ...]:
        """Return the workers that are not lost; the same on all that ask between two epochs.

        Raises:
            WorkerLost: the first server is gone.
        """
        if self._reached is None:
            return tuple(range(self._world_size))
        told: tuple[int, ...] = self.servers.call(server.present, {0: ()})[0]
        return told

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

    def _wait(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self.waiting():
            return self.servers.call(function, {0: arguments})[0]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this worker waits, so that the heartbeats of the others are watched."""
        before, self.waits = self.waits, True
        try:
            yield
        finally:
            self.waits = before
