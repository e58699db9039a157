"""Where the training thread learns a step's shares, and waits if they are not yet decided.

The control thread and the training thread meet here and nowhere else. The rule that makes one
decision out of many processes is short:

* a rank may draw any step below its *barrier*;
* when the leader asks for an exchange, the rank puts up a barrier just above what it has drawn
  and reports it; the decision takes effect at the highest barrier of all ranks;
* the decision takes the barrier away (or, in the opening phase, moves it one step on).

So no rank ever draws a step whose decision it has not received, whatever it prefetches, and
because barriers are reported by the control threads, waiting for one never needs training to
go on elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from evenstride.core.control.schedule import Schedule
from evenstride.core.fleet import Shares
from evenstride.errors import EvenstrideError, WorkerLost

# Steps a rank may still draw while an exchange is in flight, so that it need not wait.
SLACK = 1

# Seconds after which a rank that stands at a turn asks again, as somebody may have gone on.
_ASK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank's training thread stands."""

    step: int  # steps it has committed
    # (step, epoch, position) where its latest passes over the loader began.
    stands: tuple[tuple[int, int, int], ...]
    # When the latest step was committed (`time.perf_counter`); `None` if none was, or it is not
    # known.
    committed_s: float | None = None
    epoch: int | None = None  # of the data that the next step belongs to; `None` if it is not known


@dataclass(frozen=True, slots=True)
class BatchChange:
    """What a rank reports at the end of an epoch, or before a pass over restored data."""

    step: int  # the first step after it
    wanted: int | None  # batch that it has restored, and needs; `None` to have one chosen
    most: int  # largest batch of which there is one in an epoch
    weighted: bool = False  # whether the noise it measures is not in samples


@dataclass(frozen=True, slots=True)
class BarrierReport:
    """What a rank reports about its gate: its barrier, and a proof of its decisions."""

    barrier: int  # first step it has not drawn, and will not draw before the decision
    checksum: int  # of all decisions it has applied
    drawn: int = 0  # first step that it has not drawn by now
    turn: BatchChange | None = None  # where it stands still, if it does


class DrawBarrier:
    """The schedule of one rank, guarded by a barrier.

    Args:
        shares: the opening split.
        step: the first step.
        blocking: whether the opening phase holds the barrier right after the first steps.
        timeout_s: how long a draw may wait before it gives up.
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
        # Two steps go through before the first wait: the first of a pass is never modelled.
        self._barrier: int | None = step + 2 if blocking else None
        self._opening = blocking
        self._waiting = self._stopped = False
        self._turn: BatchChange | None = None
        self._told = False  # whether the leader has heard of the turn
        self._batch = 0  # that was decided at the latest turn
        self._error: EvenstrideError | None = None
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
        """What every draw raises, because the run cannot go on; ``None`` while it can."""
        return self._error

    @property
    def failed(self) -> bool:
        return self._error is not None

    def draw(self, step: int) -> Shares:
        """Return the shares of a step, waiting for its decision if need be (training thread).

        `WorkerLost` says that a rank is gone, or that no decision came within the timeout;
        `SplitDiverged` that the ranks no longer agree.
        """
        # Without the lock, because every step comes by here. It is safe: what `hold` reads is
        # either this draw or the one before it, and its barrier lies above both (or, in the
        # opening phase, this thread is waiting); what `decide` puts in force lies above, too.
        if self._blocked(step) or self._error is not None:
            with self._changed:
                self._next_draw = step
                self._wait(step)
        self._next_draw = step + 1
        return self._schedule.shares_at(step)

    def expected(self, step: int) -> Shares:
        """Return the shares of a step as far as they are known now; certain once it is drawn."""
        with self._changed:
            return self._schedule.shares_at(step)

    def rewind(self, step: int) -> None:
        """Forget the steps drawn from ``step`` on; they will be drawn again."""
        with self._changed:
            self._next_draw = step

    def turn(self, turn: BatchChange, ask: Callable[[], None]) -> int | None:
        """Stand still until the batch is decided, and return it (training thread).

        ``None`` if no more decisions will come. ``ask`` asks the leader for an exchange and never
        waits. Raises as `draw` does.
        """
        with self._changed:
            self._turn, self._told = turn, False
            self._changed.notify_all()
            started_s = asked_s = time.perf_counter()
            ask()
            while self._turn is not None and self._error is None and not self._stopped:
                self._changed.wait(_ASK_AGAIN_S)
                now_s = time.perf_counter()
                if now_s - started_s > self._timeout_s:
                    raise self._no_decision(turn.step)
                if self._turn is not None and (not self._told or now_s - asked_s > _ASK_AGAIN_S):
                    asked_s = now_s
                    ask()
            left, self._turn = self._turn, None
            if self._error is not None:
                raise self._error
            return self._batch if left is None else None

    def hold(
        self, hurry: Callable[[], bool] = lambda: False, *, standing: bool = False
    ) -> BarrierReport | None:
        """Put up the barrier and report it (control thread); ``None`` after `stop`.

        In the opening phase this waits until the training thread stands at the barrier, so that the
        step before it has been measured.

        Args:
            hurry: whether to report at once, as training waits for a rank that waits for this;
                asked once a second, and not under the lock.
            standing: whether the training thread itself calls, between two steps, and so stands at
                the barrier already.
        """
        while not standing and self._on_its_way():
            if hurry():
                break
        with self._changed:
            if self._stopped:
                return None
            if self._turn is not None:  # nothing is drawn before the decision
                self._told, step = True, self._turn.step
                return BarrierReport(step, self._schedule.checksum, step, self._turn)
            waits = self._opening and (self._waiting or standing)
            barrier = self._next_draw if waits else self._next_draw + SLACK
            # After a rewind the latest decision may lie ahead; a later one never overtakes it.
            barrier = max(barrier, self._schedule.latest)
            self._barrier = barrier if self._barrier is None else min(self._barrier, barrier)
            return BarrierReport(self._barrier, self._schedule.checksum, self._next_draw)

    def _on_its_way(self) -> bool:
        """Wait a second for the training thread to stand at its barrier; return if it does not.

        Outside of the opening nobody waits for it.
        """
        with self._changed:
            if self._opening and not (self._stopped or self._waiting or self._turn):
                self._changed.wait(_ASK_AGAIN_S)
            return self._opening and not (self._stopped or self._waiting or self._turn)

    def decide(
        self, effective: int, shares: Shares | None, *, opening: bool, batch: int | None = None
    ) -> None:
        """Apply a decision (control thread): new shares if any, and what it does to the barrier.

        Args:
            effective: first step that it is about.
            shares: of it; ``None`` to keep those in force.
            opening: whether the step after it waits for another decision.
            batch: to go on with from a turn; ``None`` if not all ranks stand at one.
        """
        with self._changed:
            # All ranks stand here, so what was decided for later steps holds for nobody yet and is
            # replaced.
            if shares is not None and batch is not None:
                self._schedule = self._schedule.replaced_from(effective, shares)
            elif shares is not None:
                self._schedule = self._schedule.decided(effective, shares)
            self._opening = opening
            # The first step of a pass is never modelled.
            ahead = 1 if batch is None else 2
            self._barrier = effective + ahead if opening else None
            if batch is not None and self._turn is not None:
                self._turn, self._batch = None, batch
            self._changed.notify_all()

    def begin_with(self, shares: Shares) -> None:
        """Replace the opening split, before the step that it is for has been drawn."""
        with self._changed:
            self._schedule = self._schedule.decided(self._next_draw, shares)

    def skip_opening(self) -> None:
        """Let no further step wait for a decision."""
        with self._changed:
            self._opening, self._barrier = False, None
            self._changed.notify_all()

    def forget_before(self, step: int) -> None:
        """Drop decisions that no step from ``step`` on needs."""
        with self._changed:
            self._schedule = self._schedule.forget_before(step)

    def fail(self, error: EvenstrideError) -> None:
        """Let every draw raise ``error`` from now on."""
        with self._changed:
            # The first error is the cause; those after it follow from it.
            self._error = self._error or error
            self._changed.notify_all()

    def stop(self) -> None:
        """No more decisions will come: take every barrier away for good."""
        with self._changed:
            self._stopped, self._opening, self._barrier = True, False, None
            self._changed.notify_all()

    def _blocked(self, step: int) -> bool:
        barrier = self._barrier  # read once: `draw` looks without the lock
        return barrier is not None and step >= barrier and self._error is None

    def _wait(self, step: int) -> None:
        """Wait for the decision about ``step``, or raise why there will be none."""
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
        if self._error is not None:
            raise self._error

    def _no_decision(self, step: int) -> WorkerLost:
        return WorkerLost(
            f"no decision for step {step} within {self._timeout_s:.0f} s, so some rank no longer "
            "answers"
        )
