"""What the ranks tell of notices becomes news once, for the right workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstride.core.membership.member_table import Happening, MembershipEvent
from evenstride.runtime.coordination.side_agreements import NoticeFilter, RankNotices, SaveSchedule

PLACES = ("machine 1", "machine 1", "machine 2")
WORKERS = ("h/0", "h/1", "k/2")


def _reported(
    left_s: float | None = 60.0, *, whole: bool = True, final: bool = True
) -> RankNotices:
    return RankNotices(left_s, whole, final, "spot")


def _news(
    notice_filter: NoticeFilter,
    *reported: RankNotices | None,
    now_s: float = 0.0,
    save_s: float | None = 1.0,
) -> list[tuple[str, MembershipEvent]]:
    return [
        (one.worker, one.change) for one in notice_filter.happenings(reported, now_s, save_s, 0.1)
    ]


def test_a_notice_of_a_machine_is_that_of_all_its_ranks_and_is_reported_once() -> None:
    notice_filter = NoticeFilter(PLACES, WORKERS)
    assert _news(notice_filter, None, None, None) == []
    later = RankNotices(60.0, True, False, "maintenance")
    assert _news(notice_filter, later, None, None) == [
        ("h/0", MembershipEvent.NOTICE),
        ("h/1", MembershipEvent.NOTICE),
    ]
    assert _news(notice_filter, replace(later, left_s=55.0), None, None, now_s=5.0) == []
    assert _news(notice_filter, later, None, _reported(whole=False)) == [
        ("k/2", MembershipEvent.NOTICE)
    ]


def test_a_notice_of_a_process_is_its_own() -> None:
    assert _news(NoticeFilter(PLACES, WORKERS), None, _reported(whole=False), None) == [
        ("h/1", MembershipEvent.NOTICE)
    ]


def test_ranks_of_an_island_are_one_worker() -> None:
    notice_filter = NoticeFilter(PLACES, ("h/0-1", "h/0-1", "k/2"))
    assert _news(notice_filter, None, _reported(whole=False), None) == [
        ("h/0-1", MembershipEvent.NOTICE)
    ]


def test_a_notice_is_withdrawn_once_and_may_come_back() -> None:
    notice_filter = NoticeFilter(PLACES, WORKERS)
    _news(notice_filter, None, None, _reported(600.0, final=False))
    assert _news(notice_filter, None, None, None) == [("k/2", MembershipEvent.WITHDRAWN)]
    assert _news(notice_filter, None, None, None) == []
    assert _news(notice_filter, None, None, _reported(600.0)) == [("k/2", MembershipEvent.NOTICE)]


def test_another_time_is_news_and_the_same_time_is_not() -> None:
    notice_filter = NoticeFilter(PLACES, WORKERS)
    _news(notice_filter, None, None, _reported(600.0, final=False))
    assert _news(notice_filter, None, None, _reported(401.0, final=False), now_s=200.0) == []
    assert _news(notice_filter, None, None, _reported(100.0, final=False), now_s=200.0) == [
        ("k/2", MembershipEvent.NOTICE)
    ]
    assert _news(notice_filter, None, None, _reported(None), now_s=210.0) == [
        ("k/2", MembershipEvent.NOTICE)
    ]
    assert _news(notice_filter, None, None, _reported(None), now_s=220.0) == []


def test_a_notice_that_runs_out_is_news_again_until_the_worker_is_let_go() -> None:
    notice_filter = NoticeFilter(PLACES, WORKERS)
    _news(notice_filter, None, None, _reported(600.0, final=False))
    assert _news(notice_filter, None, None, _reported(9.0, final=False), now_s=591.0) == [
        ("k/2", MembershipEvent.NOTICE)
    ]
    notice_filter.let_go(["k/2"])
    assert _news(notice_filter, None, None, _reported(8.0, final=False), now_s=592.0) == []
    assert _news(notice_filter, None, None, None, now_s=593.0) == [], (
        "a worker that leaves does not come back"
    )


@pytest.mark.parametrize("one", [90.0, 30.0, None])
@pytest.mark.parametrize("other", [60.0, None])
def test_of_two_notices_of_a_machine_the_earlier_counts(
    one: float | None, other: float | None
) -> None:
    news = NoticeFilter(PLACES, WORKERS).happenings(
        (_reported(one), _reported(other), None), 0.0, 1.0, 0.1
    )

    earlier = None if None in (one, other) else min(one or 0.0, other or 0.0)
    assert [(each.worker, each.left_s) for each in news] == [("h/0", earlier), ("h/1", earlier)]


def test_times_are_compared_by_the_leaders_clock() -> None:
    notice_filter = NoticeFilter(PLACES, WORKERS)
    _news(notice_filter, None, None, _reported(600.0, final=False), now_s=1000.0)
    assert _news(notice_filter, None, None, _reported(500.0, final=False), now_s=1100.0) == []
    same = _reported(600.0, final=False)
    assert _news(notice_filter, None, None, same, now_s=1100.0) == [("k/2", MembershipEvent.NOTICE)]


def test_a_notice_that_is_put_off_is_news() -> None:
    notice_filter = NoticeFilter(PLACES, WORKERS)
    _news(notice_filter, None, None, _reported(600.0, final=False))
    later = _reported(900.0, final=False)
    assert _news(notice_filter, None, None, later, now_s=10.0) == [("k/2", MembershipEvent.NOTICE)]


def test_a_final_notice_is_reported_until_the_worker_leaves() -> None:
    notice_filter = NoticeFilter(PLACES, WORKERS)
    for now_s in (0.0, 5.0):
        reported = _reported(600.0 - now_s)
        assert _news(notice_filter, None, None, reported, now_s=now_s) == [
            ("k/2", MembershipEvent.NOTICE)
        ]
    notice_filter.let_go(["k/2"])
    assert _news(notice_filter, None, None, _reported(590.0), now_s=10.0) == []


def test_what_the_core_gets() -> None:
    (happening,) = NoticeFilter(PLACES, WORKERS).happenings(
        (None, None, _reported(30.0, final=False)), 0.0, 1.0, 0.1
    )
    assert happening == Happening("k/2", MembershipEvent.NOTICE, 30.0, "spot", False)


def test_saves_are_due_once_at_or_after_their_step() -> None:
    saves = SaveSchedule(lambda: None)
    assert not saves.pending(10)
    saves.agreed(7, save=True)
    saves.agreed(9, save=False, going=(1,), why="spot")
    assert not saves.pending(6)
    assert not saves.due(6)
    assert saves.pending(7)
    assert saves.due(7)
    assert not saves.due(7)
    assert not saves.pending(8)
    assert saves.going(8) == ((), "")
    assert saves.going(10) == ((1,), "spot")
    assert not saves.pending(10)


def test_a_wish_to_save_asks_for_one_exchange_and_is_taken_once() -> None:
    asked: list[bool] = []
    saves = SaveSchedule(lambda: asked.append(True))
    saves.ask("by the clock")
    saves.ask("by the clock")
    assert len(asked) == 1
    assert saves.take_wanted() == "by the clock"
    assert saves.take_wanted() == ""
    saves.ask("again")
    assert len(asked) == 2


def test_saves_and_departures_are_kept_apart_until_their_steps() -> None:
    saves = SaveSchedule(lambda: None)
    saves.agreed(7, save=True)
    saves.agreed(9, save=True)
    saves.agreed(8, save=False, going=(1,), why="spot")
    saves.agreed(11, save=False, going=(0, 1), why="a crash")
    before = saves.parting
    assert saves.due(7)
    assert saves.pending(8)
    assert not saves.due(8)
    assert saves.pending(11)
    assert saves.due(10), "that of step 9"
    assert saves.going(11) == ((0, 1), "spot; a crash")
    assert (before, saves.parting) == (True, False)
    assert not saves.pending(99)


def test_a_departure_without_a_save_is_pending_too() -> None:
    saves = SaveSchedule(lambda: None)
    saves.agreed(5, save=False, going=(1,), why="no time to save")
    assert not saves.pending(4)
    assert saves.pending(5)
    assert not saves.due(5)
    assert saves.going(5) == ((1,), "no time to save")


def test_the_latest_wish_to_save_counts() -> None:
    saves = SaveSchedule(lambda: None)
    saves.ask("by the clock")
    saves.ask("by hand")
    assert saves.take_wanted() == "by hand"
