"""What ranks agree on in an exchange besides shares: saves, departures, and new global batches.

A decision to save travels with the decision of an exchange. It names a number of committed steps
that no rank reaches before it has received the decision. So all ranks save the same state without
another message, and training never waits. The leader filters the notices for those that are new
to the core. At the end of an epoch it compares the batch changes of all ranks, and then asks the
core for a global batch.
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

# A notice whose time has moved by less than this has not changed.
_SAME_S = 2.0


class SaveSchedule:
    """What one rank knows of the next saves. Written by the control thread."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask, self._lock = ask, threading.Lock()
        self._due = set[int]()
        self._going: dict[int, tuple[tuple[int, ...], str]] = {}
        self._next: int | None = None
        self._wanted = ""
        self.save_s: float | None = None
        """Seconds that a save takes, on the leader; ``None`` without saves."""

    def takes(self, save_s: float | None) -> None:
        """Note how long a save takes, in seconds; ``None`` without saves."""
        self.save_s = save_s

    def ask(self, reason: str) -> None:
        """Make all ranks save soon (leader only). May be called again until they do."""
        with self._lock:
            asked, self._wanted = bool(self._wanted), reason
        # Outside the lock: it sends a message, and the control thread needs the lock, too.
        if not asked:
            self._ask()

    def take_wanted(self) -> str:
        """Return the reason of the requested save and forget it; empty if none (leader only)."""
        with self._lock:
            wanted, self._wanted = self._wanted, ""
        return wanted

    def agreed(self, steps: int, *, save: bool, going: tuple[int, ...] = (), why: str = "") -> None:
        """Note what all ranks do once ``steps`` steps are committed (control thread)."""
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
        """Return whether something is due by now; cheap enough for every step (training thread)."""
        # Without the lock, for speed: `_next` is set before the draw barrier lets training reach
        # that step.
        at = self._next
        return at is not None and at <= steps

    def due(self, steps: int) -> bool:
        """Return whether a save is due at ``steps`` committed steps; returns it only once."""
        with self._lock:
            due = {at for at in self._due if at <= steps}
            self._due -= due
            self._next = min((*self._due, *self._going), default=None)
        return bool(due)

    def going(self, steps: int) -> tuple[tuple[int, ...], str]:
        """Return the ranks that end now, and the reason; usually none."""
        with self._lock:
            at = [known for known in self._going if known <= steps]
            gone = [self._going.pop(known) for known in at]
            self._next = min((*self._due, *self._going), default=None)
        ranks = tuple(sorted({rank for one, _ in gone for rank in one}))
        return ranks, "; ".join(why for _, why in gone)


@dataclass(frozen=True, slots=True)
class RankNotices:
    """A notice as a rank reports it to the leader."""

    # Seconds until the rank is preempted, by its own clock; `None` for at once.
    left_s: float | None
    whole_host: bool  # whether all ranks of its machine are preempted
    final: bool  # whether it will not be withdrawn
    why: str  # reason, in words


class NoticeFilter:
    """Turns the ranks' notices into events for the core, each reported once.

    Args:
        places: machine of each rank; equal texts for ranks of one machine.
        workers: name of the worker that each rank is, or is part of.
    """

    def __init__(self, places: Sequence[str], workers: Sequence[str]) -> None:
        self._places, self._workers = tuple(places), tuple(workers)
        self._known: dict[str, float | None] = {}
        self._gone = set[str]()

    def happenings(
        self, held: Sequence[RankNotices | None], now_s: float, save_s: float | None, ahead_s: float
    ) -> tuple[Happening, ...]:
        """Return what is new in the ranks' notices, by the leader's clock.

        ``save_s`` is the time that a checkpoint takes, ``None`` if the run saves none. ``ahead_s``
        is the time until a decision takes effect.
        """
        notices = self._of_workers(held)
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
        """Note that some workers end for good, even if their notices are withdrawn."""
        self._gone.update(workers)

    def _of_workers(self, held: Sequence[RankNotices | None]) -> dict[str, RankNotices]:
        """Return the notice of each worker that has one: the earliest of its ranks."""
        notices: dict[str, RankNotices] = {}
        for rank, one in enumerate(held):
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
            return known_s is not None  # it now has to leave at once
        moved = abs(now_s + one.left_s - known_s) > _SAME_S
        due = leave(one.left_s, save_s, ahead_s, final=one.final, again=True).go
        return moved or due


def meeting(
    turns: Sequence[BatchChange | None], drawn: Sequence[int]
) -> tuple[BatchChange | None, ...] | None:
    """Return the ranks' batch changes if they can be decided now.

    They can if all ranks wait for the same one. They also can if some rank has drawn the step
    after it: that rank left the loop just before the end of the epoch and will never wait.

    Args:
        turns: of all ranks, in rank order; ``None`` for ranks that do not wait.
        drawn: first step that each rank has not drawn.

    Returns:
        The batch changes; ``None`` if no rank waits, or some have not arrived yet.

    Raises:
        SplitDiverged: ranks need different global batches.
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
            f"rank {there[0][0]} continues with the restored global batch of {first.wanted}, but "
            f"rank {passed[0]} with the one before; load the same state on every rank"
        )
    return tuple(turns)


def asked(
    met: Sequence[BatchChange | None],
    step: int,
    present: int,
    bounds: tuple[int, int] | None,
    noise: NoiseEstimate,
) -> EpochEnded | None:
    """Return the request to the core for a batch change; ``None`` to keep the batch in force.

    ``step`` is the number of steps that the leader has committed, ``present`` the global batch in
    force. ``bounds`` are the smallest and largest batch that may be chosen; ``None`` if it is
    fixed.
    """
    there = [turn for turn in met if turn is not None]
    if len(there) < len(met):
        return None
    wanted, first = there[0].wanted, there[0].step
    if wanted is not None:
        return None if wanted == present else EpochEnded(step, first, wanted, wanted)
    if bounds is None:
        return None
    low, high = bounds
    high = max(low, min(high, *(turn.most for turn in there)))
    # With weighted batches the noise scale is in weights, not in samples.
    if not noise.steps or any(turn.weighted for turn in there):
        return EpochEnded(step, first, low, high)
    scale = noise.scale()
    return EpochEnded(step, first, low, high, _finite(scale.value), scale.low, _finite(scale.high))


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _apart(one: tuple[int, BatchChange], other: tuple[int, BatchChange]) -> SplitDiverged:
    def place(rank: int, turn: BatchChange) -> str:
        batch = "to choose a global batch" if turn.wanted is None else f"with {turn.wanted} samples"
        return f"rank {rank} stands after {turn.step} steps {batch}"

    return SplitDiverged(
        f"{place(*one)}, but {place(*other)}; load the same state on every rank and leave the "
        "loop at the same step"
    )
