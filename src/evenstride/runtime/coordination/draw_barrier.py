"""The draw barrier: gives the training thread a step's shares, or makes it wait for them.

It is the only place where the control thread and the training thread meet. Three rules turn the
decisions of many processes into one:

* A rank may draw any step below its *barrier*.
* When the leader starts an exchange, the rank puts up a barrier just above the steps it has drawn
  and reports it. The decision takes effect at the highest barrier of all ranks.
* The decision removes the barrier. In the opening it moves the barrier one step further instead.

So no rank ever draws a step before it has received the decision for that step, however far it
prefetches. The control threads report the barriers. Therefore a rank that waits for a decision
never depends on the progress of training on another rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from evenstride.core.control.schedule import Schedule
from evenstride.core.fleet import Shares
from evenstride.errors import EvenstrideError, WorkerLost

# Steps that a rank may draw while an exchange is in progress, so that it does not have to wait.
SLACK = 1

# Seconds after which a rank that waits for a batch change asks again, as another may have gone on.
_ASK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a rank's training thread."""

    step: int  # steps it has committed.
    # (step, epoch, position) at which its latest passes over the loader began.
    stands: tuple[tuple[int, int, int], ...]
    # When the latest step was committed (`time.perf_counter`); `None` if unknown or before the
    # first step.
    committed_s: float | None = None
    epoch: int | None = None  # of the latest step; `None` if unknown


@dataclass(frozen=True, slots=True)
class BatchChange:
    """What a rank reports at the end of an epoch, or before a pass over restored data."""

    step: int  # first step after the change
    wanted: int | None  # restored global batch that it needs; `None` to have one chosen
    most: int  # largest global batch that an epoch has at least one of
    weighted: bool = False  # whether the noise is measured in weights instead of samples


@dataclass(frozen=True, slots=True)
class BarrierReport:
    """What a rank reports about its barrier, and a proof of its decisions."""

    barrier: int  # first step that it has not drawn, and will not draw before the decision
    checksum: int  # of all decisions it has applied
    drawn: int = 0  # first step that it has not drawn by now
    turn: BatchChange | None = None  # the batch change that it waits for, if any


class DrawBarrier:
    """The schedule of one rank, guarded by a barrier.

    Args:
        shares: the opening split.
        step: the first step.
        blocking: whether to wait for decisions in the opening, from the second step on.
        timeout_s: how long a draw may wait, in seconds.
        ask: called when a draw has to wait, so that the leader can start the exchange.
    """

    def __init__(
        self,
        shares: Shares,
        *,
        step: int = 0,
        blocking: bool = False,
        timeout_s: float = 1800.0,
        ask: Callable[[], None] = lambda: None,
    ) -> None:
        self._changed = threading.Condition()
        self._schedule = Schedule.opening(shares, step)
        self._next_draw = step
        self._barrier: int | None = step + 1 if blocking else None
        self._opening = blocking
        self._waiting = self._stopped = False
        self._turn: BatchChange | None = None
        self._known = False  # whether the leader knows of the batch change
        self._batch = 0  # decided at the latest batch change
        self._error: EvenstrideError | None = None
        self._delivered = False
        self._timeout_s = timeout_s
        self._ask = ask
        self.waited_s = 0.0

    @property
    def opening(self) -> bool:
        return self._opening

    @property
    def waiting(self) -> bool:
        """Whether the training thread waits for the decision about its next step."""
        return self._waiting

    @property
    def error(self) -> EvenstrideError | None:
        """The error that every draw raises because the run cannot continue; else ``None``."""
        return self._error

    @property
    def delivered(self) -> bool:
        """Whether the training thread has received the error."""
        return self._delivered

    @property
    def failed(self) -> bool:
        return self._error is not None

    def draw(self, step: int) -> Shares:
        """Return the shares of a step; wait for its decision if necessary (training thread).

        Raises `WorkerLost` if a rank is lost or no decision comes within the timeout, and
        `SplitDiverged` if the ranks no longer agree.
        """
        # Without the lock, because every step runs this. It is safe: `hold` reads either this draw
        # or the previous one, and its barrier lies above both (in the opening, this thread waits).
        # What `decide` puts into force lies above, too.
        if self._blocked(step) or self._error is not None:
            with self._changed:
                self._next_draw = step
                self._wait(step)
        self._next_draw = step + 1
        return self._schedule.shares_at(step)

    def expected(self, step: int) -> Shares:
        """Return the shares of a step as far as they are known; final once the step is drawn."""
        with self._changed:
            return self._schedule.shares_at(step)

    def rewind(self, step: int) -> None:
        """Forget the steps drawn from ``step`` on; they will be drawn again."""
        with self._changed:
            self._next_draw = step

    def turn(self, turn: BatchChange, ask: Callable[[], None]) -> int | None:
        """Wait until the global batch is decided, and return it (training thread).

        Returns ``None`` if no more decisions will come. ``ask`` requests an exchange from the
        leader and never waits. Raises as `draw` does.
        """
        with self._changed:
            self._turn, self._known = turn, False
            self._changed.notify_all()
            started_s = asked_s = time.perf_counter()
            ask()
            while self._turn is not None and self._error is None and not self._stopped:
                self._changed.wait(_ASK_AGAIN_S)
                now_s = time.perf_counter()
                if now_s - started_s > self._timeout_s:
                    raise self._no_decision(turn.step)
                if self._turn is not None and (not self._known or now_s - asked_s > _ASK_AGAIN_S):
                    asked_s = now_s
                    ask()
            left, self._turn = self._turn, None
            self._raise_error()
            return self._batch if left is None else None

    def hold(
        self, hurry: Callable[[], bool] = lambda: False, *, standing: bool = False
    ) -> BarrierReport | None:
        """Put up the barrier and report it (control thread); ``None`` after `stop`.

        In the opening this waits until the training thread stands at the barrier, so that the step
        before it has been measured.

        Args:
            hurry: whether to report at once, because another rank waits for this report; called
                once a second, without the lock.
            standing: whether the training thread itself calls, between two steps, and so stands at
                the barrier already.
        """
        while not standing and self._on_its_way():
            if hurry():
                break
        with self._changed:
            if self._stopped:
                return None
            if self._turn is not None:  # no step is drawn before the decision
                self._known, step = True, self._turn.step
                return BarrierReport(step, self._schedule.checksum, step, self._turn)
            waits = self._opening and (self._waiting or standing)
            barrier = self._next_draw if waits else self._next_draw + SLACK
            # After a rewind the latest decision may lie ahead; a later one never comes before it.
            barrier = max(barrier, self._schedule.latest)
            self._barrier = barrier if self._barrier is None else min(self._barrier, barrier)
            return BarrierReport(self._barrier, self._schedule.checksum, self._next_draw)

    def _on_its_way(self) -> bool:
        """Wait up to 1 s for the training thread to stand at its barrier; return if it does not.

        Returns ``False`` at once outside of the opening.
        """
        with self._changed:
            if self._opening and not (self._stopped or self._waiting or self._turn):
                self._changed.wait(_ASK_AGAIN_S)
            return self._opening and not (self._stopped or self._waiting or self._turn)

    def decide(
        self, effective: int, shares: Shares | None, *, opening: bool, batch: int | None = None
    ) -> None:
        """Apply a decision (control thread): new shares, if any, and the next barrier.

        Args:
            effective: first step of the decision.
            shares: shares from that step on; ``None`` to keep those in force.
            opening: whether the step after it waits for another decision.
            batch: next global batch; ``None`` unless all ranks wait for a batch change.
        """
        with self._changed:
            # All ranks wait here, so decisions for later steps are not in force on any rank, and
            # are replaced.
            if shares is not None and batch is not None:
                self._schedule = self._schedule.replaced_from(effective, shares)
            elif shares is not None:
                self._schedule = self._schedule.decided(effective, shares)
            self._opening = opening
            self._barrier = effective + 1 if opening else None
            if batch is not None and self._turn is not None:
                self._turn, self._batch = None, batch
            self._changed.notify_all()

    def begin_with(self, shares: Shares) -> None:
        """Replace the opening split, before its first step has been drawn."""
        with self._changed:
            self._schedule = self._schedule.decided(self._next_draw, shares)

    def skip_opening(self) -> None:
        """Stop the opening: no further step waits for a decision."""
        with self._changed:
            self._opening, self._barrier = False, None
            self._changed.notify_all()

    def forget_before(self, step: int) -> None:
        """Drop decisions that no step from ``step`` on needs."""
        with self._changed:
            self._schedule = self._schedule.forget_before(step)

    def fail(self, error: EvenstrideError) -> None:
        """Make every draw raise ``error`` from now on."""
        with self._changed:
            # The first error is the cause; later ones follow from it.
            self._error = self._error or error
            self._changed.notify_all()

    def stop(self) -> None:
        """Remove the barrier for good, because no more decisions will come."""
        with self._changed:
            self._stopped, self._opening, self._barrier = True, False, None
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._delivered = True
            raise self._error

    def _blocked(self, step: int) -> bool:
        barrier = self._barrier  # read once, because `draw` reads it without the lock
        return barrier is not None and step >= barrier and self._error is None

    def _wait(self, step: int) -> None:
        started_s = time.perf_counter()
        self._waiting = self._blocked(step)
        if self._waiting:
            self._changed.notify_all()
            self._ask()
        while self._blocked(step):
            left_s = started_s + self._timeout_s - time.perf_counter()
            if left_s <= 0:
                raise self._no_decision(step)
            self._changed.wait(left_s)
        self._waiting = False
        self.waited_s += time.perf_counter() - started_s
        self._raise_error()

    def _no_decision(self, step: int) -> WorkerLost:
        return WorkerLost(
            f"no decision for step {step} came within {self._timeout_s:.0f} s, so some rank no "
            "longer replies"
        )
