"""The leader's desk: whose notices have come in, and which of them are news to the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenstride.core.membership.departure import leave
from evenstride.core.membership.member_table import Happening, MembershipEvent

# A notice whose time has moved by less than this is the same.
_SAME_S = 2.0


@dataclass(frozen=True, slots=True)
class RankNotices:
    """A notice as a rank tells it to the leader.

    Args:
        left_s: seconds until the rank is taken away, by its own clock; ``None`` for at once.
        whole_host: whether all ranks of its machine are.
        final: whether it will not be withdrawn.
        why: for people.
    """

    left_s: float | None
    whole_host: bool
    final: bool
    why: str


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
        """Return what is new.

        Args:
            told: the notice that each rank has, in rank order.
            now_s: the leader's clock.
            save_s: seconds that a checkpoint takes; ``None`` if the run takes none.
            ahead_s: seconds until a decision takes effect.
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
