"""What ranks arrange in an exchange besides shares: saves, departures, and the end of an epoch.

A decision to save travels with the verdict of an exchange. It names a number of committed steps
that no rank has reached before it has heard of it, so all ranks save the same state without a
message of their own, and training never waits for the question. On the leader, the notices that
come in are filtered for what is news to the core, and the ranks' turns at the end of an epoch are
compared before the core is asked for a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from evenstride.core.control.events import EpochEnded
from evenstride.core.gradients.noise_scale import NoiseEstimate
from evenstride.core.membership.member_table import Happening, MembershipEvent, leave
from evenstride.errors import SplitDiverged
from evenstride.runtime.coordination.draw_barrier import BatchChange

# A notice whose time has moved by less than this is the same.
_SAME_S = 2.0


class SaveSchedule:
    """What one rank knows of the saves to come. Written by the control thread."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask, self._lock = ask, threading.Lock()
        self._due = set[int]()
        self._going: dict[int, tuple[tuple[int, ...], str]] = {}
        self._next: int | None = None
        self._wanted = ""
        self.save_s: float | None = None
        """Seconds that a save takes, on the leader; ``None`` if nobody saves."""

    def takes(self, save_s: float | None) -> None:
        """Note how long a save takes, in seconds; ``None`` if nobody saves."""
        self.save_s = save_s

    def ask(self, reason: str) -> None:
        """Let all ranks save soon (leader only). May be called again until they do."""
        with self._lock:
            asked, self._wanted = bool(self._wanted), reason
        # Outside the lock: it sends a message, and the control thread takes the lock, too.
        if not asked:
            self._ask()

    def take_wanted(self) -> str:
        """Return why a save was asked for, and forget it; nothing if it was not (leader only)."""
        with self._lock:
            wanted, self._wanted = self._wanted, ""
        return wanted

    def agreed(self, steps: int, *, save: bool, going: tuple[int, ...] = (), why: str = "") -> None:
        """Note what all ranks do when ``steps`` steps are committed (control thread)."""
        with self._lock:
            if save:
                self._due.add(steps)
            if going:
                self._going[steps] = going, why
            self._next = min((*self._due, *self._going), default=None)

    @property
    def parting(self) -> bool:
        """Whether some ranks will end soon, as announced."""
        with self._lock:
            return bool(self._going)

    def pending(self, steps: int) -> bool:
        """Return whether something is due by now; cheap, for every step (training thread)."""
        # Without the lock, for speed: `_next` is set before the gate lets training go on to that
        # step.
        at = self._next
        return at is not None and at <= steps

    def due(self, steps: int) -> bool:
        """Return whether a save is due when ``steps`` steps are committed; it is not then again."""
        with self._lock:
            due = {at for at in self._due if at <= steps}
            self._due -= due
            self._next = min((*self._due, *self._going), default=None)
        return bool(due)

    def going(self, steps: int) -> tuple[tuple[int, ...], str]:
        """Return the ranks that end now, and why; none as a rule."""
        with self._lock:
            at = [known for known in self._going if known <= steps]
            gone = [self._going.pop(known) for known in at]
            self._next = min((*self._due, *self._going), default=None)
        ranks = tuple(sorted({rank for one, _ in gone for rank in one}))
        return ranks, "; ".join(why for _, why in gone)


@dataclass(frozen=True, slots=True)
class RankNotices:
    """A notice as a rank tells it to the leader."""

    # Seconds until the rank is taken away, by its own clock; `None` for at once.
    left_s: float | None
    whole_host: bool  # whether all ranks of its machine are
    final: bool  # whether it will not be withdrawn
    why: str  # for people


class NoticeFilter:
    """Turns what the ranks tell of notices into happenings, each told once.

    Args:
        places: where each rank runs; equal for ranks of one machine.
        workers: the name of the worker that each rank is, or is part of.
    """

    def __init__(self, places: Sequence[str], workers: Sequence[str]) -> None:
        self._places, self._workers = tuple(places), tuple(workers)
        self._known: dict[str, float | None] = {}
        self._gone = set[str]()

    def happenings(
        self, told: Sequence[RankNotices | None], now_s: float, save_s: float | None, ahead_s: float
    ) -> tuple[Happening, ...]:
        """Return what is new in the ranks' notices, by the leader's clock.

        ``save_s`` is what a checkpoint takes, ``None`` if the run takes none. ``ahead_s`` is the
        time until a decision takes effect.
        """
        notices = self._of_workers(told)
        news = [
            Happening(worker, MembershipEvent.NOTICE, one.left_s, one.why, one.final)
            for worker, one in notices.items()
            if worker not in self._gone and self._is_news(worker, one, now_s, save_s, ahead_s)
        ]
        for happening in news:
            left_s = happening.left_s
            self._known[happening.worker] = None if left_s is None else now_s + left_s
        for worker in sorted(self._known.keys() - notices.keys() - self._gone):
            del self._known[worker]
            news.append(Happening(worker, MembershipEvent.WITHDRAWN))
        return tuple(news)

    def let_go(self, workers: Sequence[str]) -> None:
        """Note that some end for good, whatever becomes of their notices."""
        self._gone.update(workers)

    def _of_workers(self, told: Sequence[RankNotices | None]) -> dict[str, RankNotices]:
        """Return the notice of each worker that has one: the earliest of its ranks'."""
        notices: dict[str, RankNotices] = {}
        for rank, one in enumerate(told):
            if one is None:
                continue
            for other, place in enumerate(self._places):
                if other == rank or (one.whole_host and place == self._places[rank]):
                    worker = self._workers[other]
                    known = notices.get(worker)
                    if known is None or (one.left_s or 0.0) < (known.left_s or 0.0):
                        notices[worker] = one
        return notices

    def _is_news(
        self, worker: str, one: RankNotices, now_s: float, save_s: float | None, ahead_s: float
    ) -> bool:
        if worker not in self._known:
            return True
        known_s = self._known[worker]
        if known_s is None or one.left_s is None:
            return known_s is not None  # it has to go at once now
        moved = abs(now_s + one.left_s - known_s) > _SAME_S
        due = leave(one.left_s, save_s, ahead_s, final=one.final, again=True).go
        return moved or due


def meeting(
    turns: Sequence[BatchChange | None], drawn: Sequence[int]
) -> tuple[BatchChange | None, ...] | None:
    """Return the ranks' turns, if there is something to decide for those who stand at one.

    That is where all stand at the same one; or where somebody has drawn the step after it and so
    will never stand there, having left the loop just before its end.

    Args:
        turns: of all ranks, in rank order; ``None`` for those who go on.
        drawn: first step that each of them has not drawn.

    Returns:
        The turns; ``None`` where nobody stands at one, or some are still on their way.

    Raises:
        SplitDiverged: ranks need different batches.
    """
    there = [(rank, turn) for rank, turn in enumerate(turns) if turn is not None]
    if not there:
        return None
    _, first = there[0]
    passed = [rank for rank, at in enumerate(drawn) if turns[rank] is None and at > first.step]
    if len(there) < len(turns) and not passed:
        return None
    for rank, turn in there:
        if (turn.step, turn.wanted) != (first.step, first.wanted):
            raise _apart(there[0], (rank, turn))
    if passed and first.wanted is not None:
        raise SplitDiverged(
            f"rank {there[0][0]} goes on with the global batch of {first.wanted} that it restored, "
            f"but rank {passed[0]} with that of before; load the same state on every rank"
        )
    return tuple(turns)


def asked(
    met: Sequence[BatchChange | None],
    step: int,
    present: int,
    bounds: tuple[int, int] | None,
    noise: NoiseEstimate,
) -> EpochEnded | None:
    """Return what the core is asked at a turn; ``None`` if the batch in force is kept unasked.

    ``step`` is what the leader has committed, ``present`` the batch in force. ``bounds`` are the
    smallest and largest batch that may be chosen; ``None`` if it is not left open.
    """
    there = [turn for turn in met if turn is not None]
    if len(there) < len(met):
        return None
    wanted, first = there[0].wanted, there[0].step
    if wanted is not None:
        return None if wanted == present else EpochEnded(step, first, wanted, wanted)
    low, high = bounds or (present, present)
    high = max(low, min(high, *(turn.most for turn in there)))
    # With weighted batches the noise scale is in weights, which are no samples.
    if not noise.steps or any(turn.weighted for turn in there):
        return EpochEnded(step, first, low, high)
    scale = noise.scale()
    return EpochEnded(step, first, low, high, _finite(scale.value), scale.low, _finite(scale.high))


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _apart(one: tuple[int, BatchChange], other: tuple[int, BatchChange]) -> SplitDiverged:
    def told(rank: int, turn: BatchChange) -> str:
        batch = "to choose a global batch" if turn.wanted is None else f"with {turn.wanted} samples"
        return f"rank {rank} stands after {turn.step} steps {batch}"

    return SplitDiverged(
        f"{told(*one)}, but {told(*other)}; load the same state on every rank and leave the loop "
        "at the same step"
    )
